"""Answer files that others read: Spec-Bench's speed script and MT-bench's judges."""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.evaluate.compare import Comparison
from medusa_jax.whole_files import write_text

Answer = dict[str, Any]


def answer_line(
    question: dict[str, Any], turns: Sequence[Comparison], name: str, *, plain: bool = False
) -> Answer:
    """One line of Spec-Bench's answer files, which MT-bench's judges read as well.

    `wall_time` is prefill and decoding, as there; `new_tokens` counts the first token, which
    prefill gives, and the end-of-text token; a step appends its accepted drafts and one more.

    Args:
      plain: the answers of plain decoding, not those of the drafter.
    """
    results = [t.autoregressive if plain else t.drafted for t in turns]
    lengths = [n for result in results for n in result.accepted_lengths]
    choice = {
        "index": 0,
        "turns": [result.text.strip() for result in results],
        "decoding_steps": [result.steps for result in results],
        "new_tokens": [result.new_tokens for result in results],
        "wall_time": [
            t.autoregressive_prefill_seconds + t.autoregressive_seconds
            if plain
            else t.prefill_seconds + t.decode_seconds
            for t in turns
        ],
        "accept_lengths": lengths,
    }
    known = f"{name}/{question['question_id']}"
    return {
        "question_id": question["question_id"],
        "category": question["category"],
        "answer_id": uuid.uuid5(uuid.NAMESPACE_URL, known).hex,
        "model_id": name,
        "choices": [choice],
        "tstamp": time.time(),
    }


def judge_line(answer: Answer) -> Answer:
    """A line of FastChat's `data/mt_bench/model_answer/<model_id>.jsonl`."""
    [choice] = answer["choices"]
    texts = {"index": choice["index"], "turns": choice["turns"]}
    return {key: answer[key] for key in ("question_id", "answer_id", "model_id")} | {
        "choices": [texts],
        "tstamp": answer["tstamp"],
    }


def write_lines(path: Path, lines: Iterable[Answer]) -> None:
    """A JSONL file, with the directories that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def spec_bench_speedup(
    answers: Sequence[Answer], plain: Sequence[Answer], encode: Callable[[str], list[int]]
) -> float:
    """The speed-up that Spec-Bench's own script gets from two answer files.

    It is the ratio of two means over questions of tokens per second. Those of the baseline are
    counted anew, from the text and without its first id (a BOS); so where a tokenizer adds none a
    token is missing, and an end-of-text token counts on one side only.

    Args:
      encode: ids of a text as the tokenizer gives them by itself, BOS included.
    """
    ours, theirs = [], []
    for answer in answers:
        [choice] = answer["choices"]
        ours.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
    for answer in plain:
        [choice] = answer["choices"]
        tokens = sum(len(encode(text)) - 1 for text in choice["turns"])
        theirs.append(tokens / sum(choice["wall_time"]))
    baseline = float(np.mean(theirs))
    return float(np.mean(ours)) / baseline if baseline else 0.0
