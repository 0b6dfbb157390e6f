"""bench --in_turn on a tiny model: one table, one copy of the backbone, costs as files say them."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
from files import write_lines
from tiny import write_model

from medusa_jax.api import Model
from medusa_jax.commands import bench, bench_in_turn
from medusa_jax.errors import UserError
from medusa_jax.evaluate.in_turn import Entrant, trained_tokens
from medusa_jax.interop.tokenizer import load_tokenizer
from medusa_jax.tree import Tree


@pytest.fixture
def prompts(tmp_path):
    return write_lines(
        tmp_path / "prompts.jsonl", ({"prompt": p} for p in ("the cat", "a b c a b"))
    )


@pytest.mark.wide
def test_drafters_in_one_table(directory, prompts, tmp_path, capsys, monkeypatch):
    backbones = []
    loaded = bench_in_turn.load_entrants

    def noted(flags):
        entrants = loaded(flags)
        backbones.extend(id(e.model.variables["backbone"]) for e in entrants)
        return entrants

    monkeypatch.setattr(bench_in_turn, "load_entrants", noted)
    drafters = f"{directory}/heads@cartesian:2x1,prompt_lookup@chain:2,none@copy:2"
    flags = (
        f"--model={directory} --prompts={prompts} --drafters={drafters} --out={tmp_path}"
    )
    assert (
        bench.main([*flags.split(), "--in_turn", "--max_new_tokens=9", "--repeats=1"]) == 0
    )
    facts = json.loads((tmp_path / "in_turn.json").read_text())
    rows = {row["drafter"]: row for row in facts["rows"]}
    assert list(rows) == ["plain", "medusa", "prompt_lookup", "copy"]
    assert [row["tree_nodes"] for row in rows.values()] == [1, 5, 3, 3]
    assert len(set(backbones)) == 1
    plain, heads, lookup, copies = rows.values()
    for field in ("mean_accepted_length", "speedup", "step_latency_ratio"):
        assert plain[field] == 1
    assert [row["divergences"] for row in rows.values()] == [0, 0, 0, 0]
    assert [row["trained_tokens"] for row in rows.values()] == [0, None, 0, 0]
    # Three heads of one 16 x 16 layer with bias in float32; a text of 1,024 tokens and its length.
    assert (heads["parameter_bytes"], lookup["parameter_bytes"]) == (3 * 4 * 16 * 17, 0)
    assert lookup["state_bytes"] == 4 * (1024 + 1) and copies["state_bytes"] == 0
    for row in rows.values():
        ideal = row["mean_accepted_length"] / row["step_latency_ratio"]
        assert row["difference"] == pytest.approx(row["speedup"] / ideal - 1)
    printed = capsys.readouterr().out
    assert (tmp_path / "in_turn.md").read_text() in printed
    assert "| medusa | 5 |" in printed and (tmp_path / "in_turn.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "table", ["--in_turn", "--ladder=3", "--batches=1", "--cache_check"]
)
def test_a_question_file_is_asked_of_every_table(tmp_path, monkeypatch, capsys, table):
    """Its first turns, as many of each category, through the template; --prompts stand as they are."""
    directory, path = tmp_path / "model", tmp_path / "questions.jsonl"
    write_model(directory)
    template = "{% for m in messages %}a {{ m.content }} the{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    questions = [
        {"question_id": i, "category": category, "turns": [turn, "and then"]}
        for i, (category, turn) in enumerate(
            [("math", "a b c"), ("math", "the end"), ("coding", "the cat")]
        )
    ]
    write_lines(path, questions)
    asked = {}

    def caught(subject, prompts, options=None, *_, **__):
        asked.update(prompts=prompts, options=options)
        raise UserError("enough")

    for where in ("in_turn.measure", "batches.batch_rows", "latency.cache_check"):
        monkeypatch.setattr(f"medusa_jax.evaluate.{where}", caught)
    flags = [f"--model={directory}", "--drafters=none", table, "--limit=2"]
    flags += ["--max_new_tokens=9", f"--out={tmp_path}"]
    monkeypatch.setattr(bench_in_turn, "ladder", lambda entrant, nodes: [entrant])
    tokenizer = load_tokenizer(str(directory))

    def expected(texts):
        """As the table takes it: the step time is of 64 tokens of one prompt."""
        return (texts[0] * 64)[:64] if table == "--cache_check" else texts

    assert bench.main([*flags, f"--questions={path}"]) == 2
    assert capsys.readouterr().err.endswith("enough\n")
    through = [tokenizer.encode(f"a {turn} the") for turn in ("a b c", "the cat")]
    assert asked["prompts"] == expected(through)
    if table in ("--in_turn", "--ladder=3"):
        assert tokenizer.eos_ids <= set(asked["options"].eos_ids)
    assert bench.main([*flags, f"--prompts={path}"]) == 2
    plain = [[tokenizer.bos_id, *tokenizer.encode(t)] for t in ("a b c", "the end")]
    assert asked["prompts"] == expected(plain)


def test_training_costs_what_the_recipe_says():
    config = {"train": {"batch_size": 4}, "data": {"seq_len": 640}}
    assert trained_tokens({"step": 100, "config": config}) == 256_000
    assert trained_tokens({"step": 100, "config": {}}) is None
    went_on = {
        "train": {"batch_size": 2, "heads_path": "first/export"},
        "data": {"seq_len": 640},
    }
    second = {"step": 50, "config": went_on, "start": {"step": 100, "config": config}}
    assert trained_tokens(second) == 256_000 + 64_000
    assert (
        trained_tokens({"step": 50, "config": went_on}) is None
    )  # the first run's are unknown


def test_the_ladder_is_chain_cartesian_tree_and_fitted_tree():
    evidence = {"head_accuracies": [[0.6, 0.3], [0.2, 0.1]]}
    calibrated = {"growth": [[0], [-1], [0, 1]], "evidence": evidence}
    heads = SimpleNamespace(drafter="medusa")
    model = SimpleNamespace(
        calibrated=calibrated, drafter=SimpleNamespace(n_heads=2, heads=heads)
    )
    model.drafts_by = partial(Model.drafts_by, model)
    rungs = bench_in_turn.ladder(Entrant("medusa+copy", model, Tree.none(), 5), 4)
    assert {e.label: e.tree.choices for e in rungs} == {
        "medusa, chain": ((0,), (0, 0)),
        "medusa, cartesian 2": ((0,), (1,)),
        "medusa+copy, fitted": ((-1,), (0,), (0, 1)),
    }
    assert all(e.model is model and e.trained_tokens == 5 for e in rungs)
    for nodes, file, message in (
        (1, calibrated, "2 nodes or more, not 1"),
        (4, None, "medusa has none"),
        (5, calibrated, "1 to 4"),
    ):
        model.calibrated = file
        with pytest.raises(UserError, match=message):
            bench_in_turn.ladder(Entrant("medusa", model, Tree.none(), 5), nodes)


def test_the_ladder_has_no_other_tree_measured(monkeypatch):
    asked = []

    def load(flags, name, tree):
        asked.append(tree)
        return SimpleNamespace(variables={"backbone": 0}, tree=Tree.none())

    monkeypatch.setattr(bench_in_turn, "load_model", load)
    for nodes in (0, 8):
        flags = SimpleNamespace(model=None, drafters="hydra,medusa", ladder=nodes)
        bench_in_turn.load_entrants(flags)
    assert asked == ["auto", "auto", "none", "none"]
