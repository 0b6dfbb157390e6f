"""bench race on a tiny model: one table, one copy of the backbone, costs as files say them."""

import json
from types import SimpleNamespace

import pytest
from files import write_lines
from tiny import write_model

from medusa_jax.commands import bench_race
from medusa_jax.errors import UserError
from medusa_jax.evaluate import race
from medusa_jax.interop.tokenizer import load_tokenizer
from medusa_jax.tree.tree import Tree
from research import batches


@pytest.fixture
def prompts(tmp_path):
    return write_lines(
        tmp_path / "prompts.jsonl", ({"prompt": p} for p in ("the cat", "a b c a b"))
    )


def arguments(directory, prompts, drafters, out):
    return [
        f"--model={directory}", f"--prompts={prompts}", f"--drafters={drafters}",
        "--max_new_tokens=9", "--repeats=1", f"--out={out}",
    ]  # fmt: skip


@pytest.mark.wide
def test_drafters_in_one_table(directory, prompts, tmp_path, capsys, monkeypatch):
    backbones = []
    loaded = bench_race.load_entrants

    def noted(*asked):
        entrants = list(loaded(*asked))
        backbones.extend(id(e.model.variables["backbone"]) for e in entrants)
        return entrants

    monkeypatch.setattr(bench_race, "load_entrants", noted)
    drafters = f"{directory}/heads@cartesian:2x1,prompt_lookup@chain:2,none@copy:2"
    assert bench_race.main(arguments(directory, prompts, drafters, tmp_path)) == 0
    facts = json.loads((tmp_path / "race.json").read_text())
    rows = {row["drafter"]: row for row in facts["rows"]}
    assert list(rows) == ["plain", "medusa", "prompt_lookup", "copy"]
    assert [row["tree_nodes"] for row in rows.values()] == [1, 5, 3, 3]
    assert len(set(backbones)) == 1
    plain = rows["plain"]
    for field in ("mean_accepted_length", "speedup", "step_latency_ratio"):
        assert plain[field] == 1
    assert [row["divergences"] for row in rows.values()] == [0, 0, 0, 0]
    for row in rows.values():
        ideal = row["mean_accepted_length"] / row["step_latency_ratio"]
        assert row["difference"] == pytest.approx(row["speedup"] / ideal - 1)
    printed = capsys.readouterr().out
    assert (tmp_path / "race.md").read_text() in printed
    assert "| medusa, cartesian:2,1 | 5 |" in printed


@pytest.mark.parametrize("command", [bench_race, batches])
def test_a_question_file_is_asked_of_every_table(tmp_path, monkeypatch, capsys, command):
    """Its first turns, as many of each category, through the template; research's --prompts stand."""
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
        asked.update(subject=subject, prompts=prompts)
        raise UserError("enough")

    monkeypatch.setattr(race, "race", caught)
    monkeypatch.setattr(batches, "batch_rows", caught)
    flags = [f"--model={directory}", "--drafters=none", "--limit=2"]
    flags += ["--max_new_tokens=9", f"--out={tmp_path}"]
    tokenizer = load_tokenizer(str(directory))
    ends = {}
    monkeypatch.setattr(
        race,
        "ourselves",
        lambda model, tree, options, **_: ends.update(ids=options.eos_ids),
    )
    through_template = "prompts" if command is bench_race else "questions"
    assert command.main([*flags, f"--{through_template}={path}"]) == 2
    assert capsys.readouterr().err.endswith("enough\n")
    through = [tokenizer.encode(f"a {turn} the") for turn in ("a b c", "the cat")]
    assert asked["prompts"] == through
    if command is bench_race:
        assert tokenizer.eos_ids <= set(ends["ids"])
        return
    assert command.main([*flags, f"--prompts={path}"]) == 2
    plain = [[tokenizer.bos_id, *tokenizer.encode(t)] for t in ("a b c", "the end")]
    assert asked["prompts"] == plain


def test_a_drafter_may_name_its_tree(monkeypatch):
    asked = []

    def load(flags, name, tree):
        asked.append((name, tree))
        model = SimpleNamespace(backbone=name, tree=Tree.none())
        model.share_backbone = lambda other: setattr(model, "backbone", other.backbone)
        model.parse_tree = lambda spec: asked.append((name, spec)) or Tree.chain(1)
        return model

    monkeypatch.setattr(bench_race, "load_model", load)
    flags, names = SimpleNamespace(model=None), ["hydra@cartesian:2x3", "medusa"]
    _, second = bench_race.load_entrants(flags, names, "8,auto")
    # What is measured for "auto" comes with loading.
    assert asked == [("hydra", "cartesian:2,3"), ("medusa", "auto"), ("medusa", "8")]
    assert list(second.trees.values()) == [Tree.chain(1), Tree.none()]
    assert second.model.backbone == "hydra"
