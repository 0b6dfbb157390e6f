"""questions on a tiny model: both turns, files that others read, figures that add up."""

import json

import numpy as np
import pytest
from files import read_lines, write_lines
from tiny import write_model

from research import questions as bench

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["the cat", "in the"]},
    {"question_id": 82, "category": "math", "turns": ["a b", "c"], "reference": ["a", "b"]},
    {"question_id": 161, "category": "translation", "turns": ["abc"], "reference": ["the a"]},
    {"question_id": 401, "category": "math_reasoning", "turns": ["a."], "reference": ["#### 4"]},
    {"question_id": 241, "category": "summarization", "turns": ["a cat in the " * 20, "c"]},
]  # fmt: skip
MT_BENCH = [
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
]


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


def test_spec_bench_s_own_script_reads_the_answers(tmp_path):
    out = tmp_path / "out"
    write_model(tmp_path, max_position=128)
    flags = {
        "model": tmp_path, "drafters": tmp_path / "heads", "trees": "chain:2",
        "questions": write_lines(tmp_path / "question.jsonl", QUESTIONS), "out": out,
        "max_new_tokens": 16, "repeats": 1, "chat_template": "plain", "max_prompt_tokens": 60,
    }  # fmt: skip
    assert bench.main([f"--{name}={value}" for name, value in flags.items()]) == 0
    rows = json.loads((out / "results.json").read_text())["rows"]
    lengths = {row["category"]: row["mean_accepted_length"] for row in rows}
    for task in ("mt_bench", "translation", "summarization", "overall"):
        speed, length = spec_bench_speed(out / "medusa, chain:2-3.jsonl", task)
        assert speed > 0 and lengths[task] == pytest.approx(length, rel=1e-9)
        assert spec_bench_speed(out / "plain-1.jsonl", task)[1] == 1
    drafted, plain = (
        [line["choices"][0]["turns"] for line in read_lines(out / f"{name}.jsonl")]
        for name in ("medusa, chain:2-3", "plain-1")
    )
    assert drafted == plain
    assert [len(turns) for turns in drafted] == [len(one["turns"]) for one in QUESTIONS]
