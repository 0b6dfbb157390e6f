"""Bundled heads, of the demo and of models that are known by name or weights: sizes, provenance, trees, exactness of the demo, and what
the README's first command would run on every platform."""

import dataclasses
import json
import os
from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from cases import thinned

import medusa_jax
from medusa_jax import Options, UserError
from medusa_jax.__main__ import main as run_command
from medusa_jax.api import DEMO
from medusa_jax.api.bundles import MODELS, bundled_heads
from medusa_jax.api.loaded_drafter import open_drafter
from medusa_jax.config import LlamaConfig
from medusa_jax.decoding import generation
from medusa_jax.evaluate.tree_fit import fastest
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.known import KNOWN
from medusa_jax.files.layouts.heads_io import load_heads, open_heads
from medusa_jax.files.source import Source
from medusa_jax.sharding import make_mesh
from medusa_jax.tree.files import TreeFile
from medusa_jax.tree.tree import Tree

OF_DEMO = bundled_heads(None)
# One row each; at temperature 0 sampling is greedy decoding.
GREEDY_AND_SAMPLED = [Options(max_new_tokens=40, temperature=t) for t in (0.0, 0.8)]
# By name, or by folder for models that are known by their weights.
FOLDERS = {row.name or row.heads: row.heads for row in KNOWN}
OF_MODELS = [
    (n, x.parent.name) for n in FOLDERS for x in MODELS.glob(f"{FOLDERS[n]}/*/heads.json")
]


def folder_of(name, drafter):
    return (MODELS / FOLDERS[name] if name else DEMO) / drafter


def recipe_of(name, drafter):
    return json.loads((folder_of(name, drafter) / "heads.json").read_text())["recipe"]


@cache
def prompts() -> list[list[int]]:
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt_ids"] for line in lines]


@cache
def plain_texts() -> list[list[int]]:
    """What plain decoding gives for two prompts."""
    model = medusa_jax.load(drafter="none", dtype="float64", tree="none")
    return [r.token_ids for r in model.generate(prompts()[3:5], GREEDY_AND_SAMPLED)]


# Shapes of the models that heads are bundled with.
SHAPES = {None: (256, 4096)} | {row.name or row.heads: row.shape[1:] for row in KNOWN}
FOREIGN = [(None, *heads) for heads in OF_MODELS]
FOREIGN += [(model, None, drafter) for model in FOLDERS for drafter in OF_DEMO]
COMMANDS = [
    ("decode", "--prompt", "hi"),
    ("serve", "--port", "0"),
    ("calibrate", "--prompts", "{file}", "--out", "{out}.json"),
    ("bench", "--prompts", "{file}"),
    ("distill", "--prompts", "{file}", "--out", "{out}"),
    ("convert", "--to", "native", "--out", "{out}"),
]


def refuse_to_read(monkeypatch):
    """No weights of heads may be read, and none of a backbone but for its fingerprint."""

    def read(*given, **more):
        raise AssertionError("weights are read")

    monkeypatch.setattr(Source, "load", read)
    monkeypatch.setattr(BaseFiles, "lm_head_columns", read)


@pytest.mark.parametrize(("model", "name", "drafter"), FOREIGN)
@pytest.mark.parametrize("mark", [None, "0" * 16])
def test_heads_of_another_model_are_refused_before_they_are_read(
    model, name, drafter, mark, monkeypatch
):
    """All bundled heads on all bundled models; in every way to open heads."""
    refuse_to_read(monkeypatch)
    width, vocab = SHAPES[model]
    config = LlamaConfig(vocab_size=vocab, d_model=width)
    said = f"width {SHAPES[name][0]} and vocabulary {SHAPES[name][1]}, the model has width {width}"
    heads = open_heads(str(folder_of(name, drafter)))
    with pytest.raises(UserError, match=said):
        load_heads(heads, config, make_mesh(), fingerprint=mark)
    base = SimpleNamespace(config=config)
    with pytest.raises(UserError, match=said):
        open_drafter(heads, base, None, None, make_mesh(), mark)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_every_command_refuses_them_in_the_same_words(
    command, tmp_path, monkeypatch, capsys
):
    refuse_to_read(monkeypatch)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    places = {"file": tmp_path / "prompts.jsonl", "out": tmp_path / "out"}
    words = [word.format(**places) for word in command]
    words += [
        "--drafters" if command[0] == "bench" else "--drafter",
        str(MODELS / "smollm2/hydra"),
    ]
    assert run_command(words) == 2
    said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(said) == 1 and "vocabulary 49152, the model has width 256" in said[0]


@pytest.mark.wide
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "tree", "least"),
    [
        ("medusa", "64", 1.5),
        *((n, "8", 1.5) for n in OF_DEMO if n != "medusa"),
        ("draft_model", "chain:3", 1.2),
    ],
)
def test_drafts_are_accepted_and_the_text_is_that_of_plain_decoding(name, tree, least):
    model = medusa_jax.load(drafter=name, dtype="float64", tree=tree)
    results = model.generate(prompts()[3:5], GREEDY_AND_SAMPLED)
    assert [r.token_ids for r in results] == plain_texts()
    for result in results:
        assert (result.new_tokens - 1) / result.steps > least


def test_provenance_is_that_of_the_heads():
    made = json.loads((DEMO / "provenance.json").read_text())["heads"]
    assert set(made) == set(OF_DEMO)
    for name in OF_DEMO:
        recipe = recipe_of(None, name)
        assert made[name]["config"] == recipe["config"], name
        assert made[name]["last"]["train"]["step"] == recipe["step"], name


@pytest.mark.parametrize(("name", "drafter"), [*((None, d) for d in OF_DEMO), *OF_MODELS])
def test_the_tree_is_the_best_of_its_evidence_and_fits_the_heads(name, drafter):
    tree = TreeFile.read(folder_of(name, drafter) / "tree.json").content
    if "batches" in tree:  # interleaved rounds of sizes, one row
        best = fastest(tree["batches"][0]["rows"])
    else:
        rows = tree["evidence"]["ladder"]
        best = max(rows, key=lambda r: r["tokens_per_step"] / r["step_seconds"])["nodes"]
    assert tree["nodes"] == best == len(tree["choices"]) + 1
    largest, heads = Tree.from_choices(tree["growth"]), recipe_of(name, drafter)["config"]
    assert largest.n_nodes >= 64 and largest.drafted.depth <= heads["heads"]["n_heads"]
    if name is None:
        assert medusa_jax.load(drafter=drafter).tree.n_nodes == best
    else:
        assert largest.max_rank < heads["heads"]["draft_vocab"]


@pytest.mark.parametrize(("name", "drafter"), OF_MODELS)
def test_weights_are_whole_and_of_their_description(name, drafter):
    """And the recipe names no path of the machine that made them."""
    stored, recipe = open_heads(str(folder_of(name, drafter))), recipe_of(name, drafter)
    shape, fields = recipe["config"]["model"]["arch"], dataclasses.fields(LlamaConfig)
    values = {f.name: shape[f.name] for f in fields if f.name in shape}
    config = LlamaConfig(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    )
    arrays, ids = stored.read(config), stored.ids
    assert stored.heads.drafter == drafter and arrays and ids is not None
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in arrays.values())
    assert len(np.unique(ids)) == len(ids) == stored.heads.draft_vocab
    assert ids.min() >= 0 and ids.max() < config.vocab_size
    data = recipe["config"]["data"]
    for path in (*data["source"].split(","), data["eval_source"], data["features_path"]):
        assert path and not os.path.isabs(path)
    told = (MODELS / FOLDERS[name] / "README.md").read_text()
    assert f"| `{drafter}/` |" in told


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


@pytest.mark.parametrize(
    ("platform", "drafter"),
    thinned(
        [("cpu", "hydra"), ("tpu", "hydra"), *(("gpu", drafter) for drafter in OF_DEMO)],
        ("cpu", "hydra"),
        ("gpu", "hydrapp"),
        ("gpu", "medusa"),
    ),
)
def test_the_demo_traces_with_its_tree_and_type(platform, drafter, monkeypatch):
    """Tracing meets every shape of the prefill and the loop."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    model = medusa_jax.load(drafter=drafter)
    _, engine, request = model.plan(["def parse("], Options())

    def run(variables):
        state, _ = generation.begin(engine, variables, request)
        return generation.decode_loop(engine, variables, state, 1)

    jax.eval_shape(run, model.variables)
    assert (engine.tree.n_nodes == 64) == (platform != "cpu")
    assert 1 < engine.tree.path_length <= model.drafter.n_heads + 1
    assert model.dtype == ("float32" if platform == "cpu" else "bfloat16")
