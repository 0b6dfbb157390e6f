"""bench race on a tiny model: one table, one copy of the backbone, costs as files say them."""

import json

import pytest
from files import write_lines

from medusa_jax.commands import bench_race


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
