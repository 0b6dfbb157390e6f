"""Answer files for Spec-Bench's speed script and MT-bench's judges."""

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

    `wall_time` covers prefill and decoding, as in Spec-Bench; `new_tokens` includes the first token,
    which comes from prefill, and the end-of-text token; a step appends its accepted drafts and one more.

    Args:
      plain: use the answers of plain decoding instead of the drafter's.
    """
    results = [t.autoregressive if plain else t.drafted for t in turns]
    lengths = [n for result in results for n in result.accepted_lengths]
    choice = {
        "index": 0,
        "turns": [result.text.strip() for result in results],
        "decoding_steps": [result.steps for result in results],
        "new_tokens": [result.new_tokens for result in results],
        "wall_time": [result.prefill_seconds + result.decode_seconds for result in results],
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
    """Write a JSONL file; creates missing directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def spec_bench_speedup(
    answers: Sequence[Answer], plain: Sequence[Answer], encode: Callable[[str], list[int]]
) -> float:
    """The speed-up that Spec-Bench's script computes from two answer files.

    It is the ratio of two means of tokens per second over questions. The script recounts the tokens
    of the baseline from the text and drops the first id (BOS). So a tokenizer that adds no BOS loses
    a token, and the end-of-text token counts on one side only.

    Args:
      encode: ids of a text with the tokenizer's defaults, BOS included.
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
