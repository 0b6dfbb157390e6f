"""bench: drafters and trees, question files by category, batches, and files for other tools."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from cases import wide
from files import read_lines, write_lines
from tiny import write_model

from medusa_jax import Model, Options, Tree
from medusa_jax.commands import bench
from medusa_jax.commands.decode_report import draft_weights
from medusa_jax.commands.entrants import Entrant, contenders_of, load_entrants, marked
from medusa_jax.evaluate.prompt_files import DEMO_PROMPTS


@pytest.mark.wide
def test_bench_races_drafters_and_trees(files, tmp_path, capsys):
    """A drafter may name its tree; the others have each of --trees."""
    directory, prompts = files
    arguments = [
        f"--model={directory}", f"--prompts={prompts}", f"--out={tmp_path}",
        f"--drafters={directory}/heads,prompt_lookup@copy:2,", "--trees=chain:2,cartesian:2x2,",
        "--limit=2", "--max_new_tokens=20", "--repeats=1",
    ]  # fmt: skip
    assert bench.main(arguments) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "race.md").read_text() in printed
    said = " ".join(printed.split())
    assert "| medusa, chain:2 | 3 |" in said and "autoregressive loop" in said
    plain, *rows = json.loads((tmp_path / "race.json").read_text())["rows"]
    assert [row["tree_nodes"] for row in rows] == [3, 7, 3] and plain["speedup"] == 1
    assert rows[-1]["label"] == "copy, copy:2"
    for row in rows:
        assert row["tokens"] == plain["tokens"] == 2 * 19 and row["divergences"] == 0
        assert row["speedup"] > 0 and row["end_to_end_speedup"] > 0
        assert row["step_latency_ratio"] > 0 and abs(row["difference"]) < 1e-9


def test_an_automatic_tree_is_raced_as_decode_runs_it(files, monkeypatch):
    """The model chooses in every step; a tree by name is fixed."""
    flags = bench.Flags(model=str(files[0]), draft_weights="float32")
    names = [f"{files[0]}/heads@auto,chain:1", "prompt_lookup@auto", "none@none"]
    entrant, *others = load_entrants(flags, names, "chain:2")
    assert [draft_weights(e.model, "greedy") for e in others] == [None, None]
    asked = []
    monkeypatch.setattr(Model, "generate", lambda self, *args, tree: asked.append(tree))
    for contender in contenders_of([entrant], Options()):
        with pytest.raises(TypeError):  # it returned nothing
            contender.decode([3])
    assert asked == [Tree.none(), None, entrant.model.parse_tree("chain:1")]


def test_heads_of_one_family_have_labels_and_files_of_their_own(files, tmp_path):
    """Names of their directories, or paths where these are equal; a path in a label names no directory.

    A path may have the marks of lists and trees.
    """
    drafter = SimpleNamespace(heads=SimpleNamespace(drafter="medusa"))
    model = SimpleNamespace(drafter=drafter, has_drafter=True)
    found = marked([Entrant(name, model, {}) for name in ("a/heads", "b/other")])
    assert [e.mark for e in found] == [" (heads)", " (other)"]
    heads = [tmp_path / "a,b" / "heads", tmp_path / "b@2" / "heads"]
    for copy in heads:
        shutil.copytree(files[0] / "heads", copy)
    flags = bench.Flags(
        model=str(files[0]), drafters=(*map(str, heads), "none@none"), trees="chain:2",
        questions=str(write_lines(tmp_path / "q.jsonl", [SPEC_BENCH[0]])),
        out=str(tmp_path / "out"), max_new_tokens=4, repeats=1,
    )  # fmt: skip
    assert bench.run(flags) == 0
    rows = json.loads((tmp_path / "out" / "race.json").read_text())["rows"]
    labels = [f"medusa ({path}), chain:2" for path in heads]
    assert [row["label"] for row in rows[1:3]] == labels
    for label in labels:
        assert (tmp_path / "out" / f"{label.replace('/', '_')}-3.jsonl").is_file()


SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["the cat", "in the"]},
    {"question_id": 82, "category": "math", "turns": ["a b", "c"], "reference": ["a", "b"]},
    {"question_id": 161, "category": "translation", "turns": ["abc"], "reference": ["the a"]},
    {"question_id": 401, "category": "math_reasoning", "turns": ["a."], "reference": ["#### 4"]},
    {"question_id": 241, "category": "summarization", "turns": ["a cat in the " * 20, "c"]},
]  # fmt: skip
MT_BENCH = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"]
MT_BENCH += ["humanities"]


def spec_bench_speed(answers, task):
    """Tokens per second and accepted length as `evaluation/speed.py` of Spec-Bench computes them."""
    speeds, lengths = [], []
    for line in read_lines(answers):
        kind = "mt_bench" if line["category"] in MT_BENCH else line["category"]
        if task in ("overall", line["category"], kind):
            choice = line["choices"][0]
            speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
            lengths.extend(choice["accept_lengths"])
    return np.mean(speeds), np.mean(lengths)


@pytest.mark.wide
def test_spec_bench_s_own_script_reads_the_answers(tmp_path):
    out = tmp_path / "out"
    write_model(tmp_path, max_position=128)
    flags = {
        "model": tmp_path, "drafters": tmp_path / "heads", "trees": "chain:2",
        "questions": write_lines(tmp_path / "question.jsonl", SPEC_BENCH), "out": out,
        "max_new_tokens": 16, "repeats": 1, "chat_template": "plain", "max_prompt_tokens": 60,
    }  # fmt: skip
    assert bench.main([*(f"--{k}={v}" for k, v in flags.items()), "--by_category"]) == 0
    rows = json.loads((out / "race.json").read_text())["rows"]
    drafted = [row for row in rows if row["drafter"] != "plain"]
    lengths = {row["category"]: row["mean_accepted_length"] for row in drafted}
    assert {row["speedup"] for row in rows if row["drafter"] == "plain"} == {1}
    for task in ("mt_bench", "translation", "summarization", "overall"):
        speed, length = spec_bench_speed(out / "medusa, chain:2-3.jsonl", task)
        assert speed > 0 and lengths[task] == pytest.approx(length, rel=1e-9)
        assert spec_bench_speed(out / "plain-1.jsonl", task)[1] == 1
    drafted, plain = (
        [line["choices"][0]["turns"] for line in read_lines(out / f"{name}.jsonl")]
        for name in ("medusa, chain:2-3", "plain-1")
    )
    assert drafted == plain
    assert [len(turns) for turns in drafted] == [len(one["turns"]) for one in SPEC_BENCH]


@pytest.mark.parametrize("batches", wide("2", "1,3"))
def test_batches_are_compared_with_plain_decoding_of_their_size(
    files, tmp_path, batches, capsys
):
    """Four prompts, the last batch filled up; texts do not end early."""
    directory, prompts = files
    arguments = [
        f"--model={directory}", f"--prompts={prompts}", f"--out={tmp_path}",
        f"--drafters={directory}/heads", "--trees=chain:2", f"--batches={batches}",
        "--max_new_tokens=12", "--repeats=1", "--dtype=float32",
    ]  # fmt: skip
    assert bench.main(arguments) == 0
    sizes = [int(size) for size in batches.split(",")]
    rows = json.loads((tmp_path / "race.json").read_text())["rows"]
    assert [row["batch"] for row in rows] == [size for size in sizes for _ in range(2)]
    for size, plain, drafted in zip(sizes, rows[::2], rows[1::2], strict=True):
        texts = size * -(-4 // size)
        assert plain["texts"] == drafted["texts"] == texts and plain["speedup"] == 1
        assert plain["tokens"] == drafted["tokens"] == texts * 11
        assert drafted["tree_nodes"] == 3 and drafted["divergences"] == 0
        assert drafted["autoregressive_tokens_per_second"] == plain["tokens_per_second"]
    assert "| batch | drafter" in capsys.readouterr().out
    assert bench.main([*arguments, "--by_category"]) == 2


@pytest.mark.parametrize("model", [None, "another"])
def test_the_demo_s_prompts_are_ids_to_the_demo_alone(model):
    """Another model reads their texts with its own tokenizer."""
    flags = bench.Flags(model=model, prompts=str(DEMO_PROMPTS), limit=3)
    records = bench.prompts_of(flags)
    assert records and all(("prompt_ids" in r) == (model is None) for r in records)
    assert all(r["prompt"] for r in records)
