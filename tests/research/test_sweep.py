"""sweep, ties and batches on a tiny model."""

import json
import shutil

import pytest
from files import write_lines

from medusa_jax.api import Model
from medusa_jax.tree.tree import Tree
from research import batches, sweep, ties

PROMPTS = ["the cat", "a b c", "in the", "abc"]


@pytest.fixture(scope="module")
def files(directory, tmp_path_factory):
    """A model directory with heads, and a file of prompts."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    return directory, write_lines(prompts, ({"prompt": p} for p in PROMPTS))


@pytest.mark.wide
def test_sweep_measures_every_rule_and_draws(files, tmp_path, capsys):
    directory, prompts = files
    heads = tmp_path / "other"  # the same heads under another name
    shutil.copytree(directory / "heads", heads)
    arguments = [
        f"--model={directory}", f"--drafter={directory}/heads,{heads}", f"--prompts={prompts}",
        f"--out={tmp_path}", "--tree=chain:2", "--max_new_tokens=16",
        "--epsilons=0.01,0.8", "--temperatures=0,1.0",
    ]  # fmt: skip
    assert sweep.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count("| typical, T 0.7 |") == 4
    assert f"| {heads}, typical (lossy) |" in printed
    facts = json.loads((tmp_path / "sweep.json").read_text())
    first, second = facts["drafters"]
    assert second == first | {"drafter": str(heads)}  # every drafter is swept
    low, high = first["thresholds"]
    assert (low["epsilon"], low["delta"]) == (0.01, 0.1)
    # A lower threshold lets more drafts pass.
    assert low["mean_accepted_length"] > high["mean_accepted_length"] >= 1
    rows = {(r["acceptance"], r["temperature"]): r for r in first["temperatures"]}
    greedy = first["greedy"]
    assert len(rows) == 6 and greedy["mean_log_probability"] < 0
    for rule in sweep.RULES:  # at temperature 0 all rules are greedy decoding
        cold = rows[rule, 0.0]
        assert cold["mean_accepted_length"] == greedy["mean_accepted_length"]
        assert cold["mean_log_probability"] == greedy["mean_log_probability"]
    pictures = {p.name for p in tmp_path.iterdir() if p.suffix == ".png"}
    assert pictures == {"thresholds.png", "temperatures.png"}
    assert sweep.main([*arguments, "--temperature=0"]) == 2


def test_ties_reports_divergences_and_judges_them(files, tmp_path, capsys, monkeypatch):
    directory, prompts = files
    out = tmp_path / "ties.json"
    arguments = [
        f"--model={directory}", f"--drafter={directory}/heads", f"--prompts={prompts}",
        f"--out={out}", "--tree=chain:2", "--max_new_tokens=40", "--dtype=float32",
    ]  # fmt: skip
    assert ties.main(arguments) == 0
    facts = json.loads(out.read_text())
    assert facts["prompts"] == 4 and facts["not_explained"] == 0
    assert facts["tokens_compared"] <= 160 and "per token" in capsys.readouterr().out

    # A decoder with a defect: plain decoding of another prompt.
    plain = Model.generate

    def wrong(self, batch, options, ids=None, **kwargs):
        if kwargs["tree"] == Tree.none():
            batch = [[*b[:-1], 5] for b in batch]
        return plain(self, batch, options, ids, **kwargs)

    monkeypatch.setattr(Model, "generate", wrong)
    assert ties.main(arguments) == 1
    facts = json.loads(out.read_text())
    assert facts["not_explained"] > 0 and "NO" in capsys.readouterr().out


@pytest.mark.wide
def test_batches_fits_a_tree_to_each(files, tmp_path, capsys):
    directory, prompts = files
    heads = tmp_path / "heads"
    shutil.copytree(directory / "heads", heads)
    arguments = [
        f"--model={directory}", f"--drafters={heads}", f"--prompts={prompts}",
        f"--out={tmp_path}", "--sizes=1,3", "--most_nodes=2", "--limit=4",
        "--max_new_tokens=12", "--repeats=1", "--dtype=float32",
    ]  # fmt: skip
    assert batches.main(arguments) == 2
    assert "calibrate" in capsys.readouterr().err
    ladder = [{"nodes": 1, "tokens_per_step": 1.0}, {"nodes": 2, "tokens_per_step": 99.0}]
    tree = {"choices": [], "growth": [[0]], "evidence": {"ladder": ladder}}
    (heads / "tree.json").write_text(json.dumps(tree))
    assert batches.main(arguments) == 0
    assert capsys.readouterr().out.count(" of ") == 2
    facts = json.loads((tmp_path / "batches-medusa.json").read_text())
    one, three = facts["rows"]
    assert (one["batch"], three["batch"]) == (1, 3)
    # So good a guess is always worth a second node.
    assert one["tree_nodes"] == three["tree_nodes"] == 2
    # 4 prompts: four groups of one, two groups of three (two prompts come again).
    assert (one["texts"], three["texts"]) == (4, 6)
    assert (one["tokens"], three["tokens"]) == (4 * 11, 6 * 11)
    for row in facts["rows"]:
        assert row["speedup"] > 0 and row["divergences"] == 0
