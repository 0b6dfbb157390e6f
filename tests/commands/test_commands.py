"""calibrate, distill and bench on a tiny model: files, figures, resuming, bad input."""

import dataclasses
import json
import re

import numpy as np
import pytest
from files import write_lines

from medusa_jax import progress
from medusa_jax.api import device_tree
from medusa_jax.commands import bench, calibrate, distill
from medusa_jax.commands.flags import Program, at_least, flag
from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError
from medusa_jax.interop.hf_config import read_config
from medusa_jax.training.data.rows import TokenRows
from medusa_jax.tree.tree import Tree
from research import sweep, ties

PROMPTS = ["the cat", "a b c", "in the", "abc"]


@pytest.fixture(scope="module")
def files(directory, tmp_path_factory):
    """A model directory with heads, and a file of prompts."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    return directory, write_lines(prompts, ({"prompt": p} for p in PROMPTS))


def test_calibrate_writes_a_tree_with_its_evidence(files, tmp_path, capsys, monkeypatch):
    directory, prompts = files
    monkeypatch.setattr(progress, "LINES", 0.0)
    out = tmp_path / "tree.json"
    code = calibrate.main(
        [
            f"--model={directory}", f"--drafter={directory}/heads", f"--prompts={prompts}",
            f"--out={out}", "--max_new_tokens=40", "--sizes=1,2,4", "--rounds=2",
            "--batches=1,2", f"--plots={tmp_path}/plots",
        ]
    )  # fmt: skip
    assert code == 0
    found = json.loads(out.read_text())
    evidence = found["evidence"]
    ladder = evidence["ladder"]
    assert [row["nodes"] for row in ladder] == [1, 2, 4]
    assert ladder[0]["tokens_per_step"] == 1 and ladder[0]["step_latency_ratio"] == 1
    assert ladder[1]["tokens_per_step"] <= ladder[2]["tokens_per_step"]
    one, two = found["batches"]
    assert (one["batch"], two["batch"]) == (1, 2)
    for rung in (one, two):
        fastest = max(row["speedup"] for row in rung["rows"])
        chosen = {1: 1.0} | {row["nodes"]: row["speedup"] for row in rung["rows"]}
        assert chosen[rung["nodes"]] >= max(1, fastest) / device_tree.MARGIN
    assert found["nodes"] == one["nodes"] == len(found["choices"]) + 1
    assert Tree.from_choices(found["growth"]).n_nodes == len(found["growth"]) + 1
    assert np.shape(evidence["head_accuracies"])[0] == 3
    assert (found["temperature"], found["batch"], found["platform"]) == (0, 1, "cpu")
    printed, said = capsys.readouterr()
    assert "2 at a time" in printed
    for stage in (f"writing: {len(PROMPTS)} of {len(PROMPTS)} prompts, ", "ranks: ",
                  "four stages: text for 4 prompts, ", "choosing by batch size: 1 of 2 batch sizes, "):  # fmt: skip
        assert stage in said
    assert re.search(r"timing (\d+) trees: 1 of \d+ runs, \d+ (seconds|minutes) left", said)
    pictures = {p.name for p in (tmp_path / "plots").iterdir()}
    assert pictures == {"tree.png", "curves.png"}


def test_distill_writes_a_training_set_of_the_model_s_own_text(files, tmp_path):
    directory, prompts = files
    arguments = [
        f"--model={directory}", f"--prompts={prompts}", f"--out={tmp_path}",
        "--max_new_tokens=12", "--batch_size=3", "--temperature=0.7",
    ]  # fmt: skip
    assert distill.main(arguments) == 0
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == len(PROMPTS)
    tokens, counted = np.load(tmp_path / "tokens.npy"), np.load(tmp_path / "counted.npy")
    assert counted.sum() == sum(len(s["token_ids"]) for s in samples)
    assert tokens[~counted].tolist() == [i for s in samples for i in s["prompt_ids"]]
    cfg = DataConfig(seq_len=32, packing="first_fit")
    assert TokenRows(str(tmp_path), cfg, read_config(str(directory)).vocab_size).rows >= 1

    # Stopped in mid-line and started again: the same file.
    whole = (tmp_path / "samples.jsonl").read_bytes()
    (tmp_path / "samples.jsonl").write_bytes(whole[: len("\n".join(lines[:3])) + 9])
    assert distill.main(arguments) == 0
    assert (tmp_path / "samples.jsonl").read_bytes() == whole


def test_bench_races_trees_of_one_drafter(files, tmp_path, capsys):
    directory, prompts = files
    arguments = [
        "race", f"--model={directory}", f"--drafters={directory}/heads", f"--prompts={prompts}",
        f"--out={tmp_path}", "--trees=chain:2,cartesian:2x2", "--limit=2",
        "--max_new_tokens=20", "--repeats=1",
    ]  # fmt: skip
    assert bench.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "| medusa, chain:2 | 3 |" in printed and "autoregressive loop" in printed
    plain, *rows = json.loads((tmp_path / "race.json").read_text())["rows"]
    assert [row["tree_nodes"] for row in rows] == [3, 7] and plain["speedup"] == 1
    for row in rows:
        assert row["tokens"] == plain["tokens"] == 2 * 19
        assert row["speedup"] > 0 and row["end_to_end_speedup"] > 0
        assert row["step_latency_ratio"] > 0 and abs(row["difference"]) < 1e-9


@pytest.mark.parametrize("command", [distill, sweep, ties])
def test_the_tree_is_that_of_the_batches(command, files, tmp_path, capsys, monkeypatch):
    def load(flags, name=None, **more):
        raise UserError(f"for {more['batch']} rows")

    monkeypatch.setattr(command, "load_model", load)
    arguments = [f"--prompts={files[1]}", f"--out={tmp_path}/out", "--batch_size=3"]
    assert command.main(arguments) == 2
    assert "for 3 rows" in capsys.readouterr().err


def test_a_flag_is_declared_once():
    """With its help and type in one class; another default in a subclass keeps both."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Shared:
        rows: int = flag("rows of a batch", 2, type=at_least(1))
        names: list[str] = flag("several", [])  # noqa: RUF009
        limit: float | None = flag("at most", None)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Flags(Shared):
        """What it does."""

        rows: int = 3
        out: str = flag("a file")
        quick: bool = flag("no wait", False)

    seen = []
    main = Program("x", Flags, lambda flags: seen.append(flags) or 0)
    assert main(["--out=a", "--names=b", "--names=c", "--limit=0.5", "--quick"]) == 0
    assert main(["--out=a"]) == 0
    assert seen == [
        Flags(out="a", names=["b", "c"], limit=0.5, quick=True, rows=3),
        Flags(out="a"),
    ]
    text = main.parser().format_help()
    assert "rows of a batch (default: 3)" in text and "What it does." in text
    assert "at most\n" in text
    for wrong in ("--rows=0", "--names=b"):  # too few; no --out
        assert main([wrong]) == 2
