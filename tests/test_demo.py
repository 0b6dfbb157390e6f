"""The bundled demo: its size, its figures' honesty, and exactness on real text."""

import json
from functools import cache

import pytest

import medusa_jax
from medusa_jax import Options
from medusa_jax.api import DEMO, device_tree
from medusa_jax.api.finding import bundled_heads

BUNDLED = bundled_heads(None)


@cache
def prompts() -> list[list[int]]:
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt_ids"] for line in lines]


def size(path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_sizes_stay_within_their_limits():
    assert size(DEMO / "backbone") <= 14_000_000
    for name in BUNDLED:
        assert size(DEMO / name) <= 5_000_000, name
    assert size(DEMO / "draft_model") <= 2_000_000
    assert size(DEMO) <= 40_000_000


def greedy_and_sampled(n: int) -> list[Options]:
    """One row each; at temperature 0 sampling is greedy decoding."""
    return [Options(max_new_tokens=n, temperature=t) for t in (0.0, 0.8)]


@cache
def plain_texts() -> list[list[int]]:
    """What plain decoding gives for two prompts."""
    model = medusa_jax.load(drafter="none", dtype="float64", tree="none")
    return [r.token_ids for r in model.generate(prompts()[3:5], greedy_and_sampled(40))]


@pytest.mark.wide
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "tree", "least"),
    [
        ("medusa", "64", 1.5),
        *((n, "8", 1.5) for n in BUNDLED if n != "medusa"),
        ("draft_model", "chain:3", 1.2),
    ],
)
def test_drafts_are_accepted_and_the_text_is_that_of_plain_decoding(name, tree, least):
    model = medusa_jax.load(drafter=name, dtype="float64", tree=tree)
    results = model.generate(prompts()[3:5], greedy_and_sampled(40))
    assert [r.token_ids for r in results] == plain_texts()
    for result in results:
        assert (result.new_tokens - 1) / result.steps > least


def test_provenance_says_of_all_heads_what_lies_beside_them():
    made = json.loads((DEMO / "provenance.json").read_text())["heads"]
    assert set(made) == set(BUNDLED)
    for name in BUNDLED:
        recipe = json.loads((DEMO / name / "heads.json").read_text())["recipe"]
        assert made[name]["config"] == recipe["config"], name
        assert made[name]["last"]["train"]["step"] == recipe["step"], name


@pytest.mark.parametrize("name", BUNDLED)
def test_tree_beside_the_heads_is_the_one_its_evidence_names(name):
    tree = json.loads((DEMO / name / "tree.json").read_text())
    if "batches" in tree:  # rounds of sizes in turn, one row
        best = {"nodes": device_tree.fastest(tree["batches"][0]["rows"])}
    else:
        ladder = tree["evidence"]["ladder"]
        best = max(ladder, key=lambda row: row["tokens_per_step"] / row["step_seconds"])
    assert tree["nodes"] == best["nodes"] == len(tree["choices"]) + 1
    assert medusa_jax.load(drafter=name).tree.n_nodes == tree["nodes"]


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["medusa", "hydra"])
@pytest.mark.parametrize("tree", ["auto", "64"])
def test_fifty_prompts_by_two_hundred_tokens_without_a_mismatch(name, tree):
    model = medusa_jax.load(drafter=name, dtype="float64", tree=tree)
    assert len(prompts()) >= 50
    for prompt in prompts()[:50]:
        ours = model.generate([prompt], Options(max_new_tokens=200))[0]
        plain = model.generate([prompt], Options(max_new_tokens=200), tree="none")[0]
        assert ours.token_ids == plain.token_ids
