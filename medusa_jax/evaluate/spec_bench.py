"""Answers in Spec-Bench's JSONL format, which MT-bench's judges read as well."""

import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from medusa_jax.evaluate.race import Run
from medusa_jax.whole_files import Json, write_text


def answer_line(question: Json, turns: Sequence[Run], name: str) -> Json:
    """One line of an answer file.

    `wall_time` covers prefill and decoding, as in Spec-Bench; `new_tokens` includes the first token,
    which comes from prefill, and the end-of-text token; a step appends its accepted drafts and one more.

    Args:
      turns: a run of this engine for each turn.
    """
    results = [run.results[0] for run in turns]
    choice = {
        "index": 0,
        "turns": [result.text.strip() for result in results],
        "decoding_steps": [result.steps for result in results],
        "new_tokens": [result.new_tokens for result in results],
        "wall_time": [run.prefill_seconds + run.decode_seconds for run in turns],
        "accept_lengths": [n for result in results for n in result.accepted_lengths],
    }
    identifier = f"{name}/{question['question_id']}"
    return {
        "question_id": question["question_id"],
        "category": question["category"],
        "answer_id": uuid.uuid5(uuid.NAMESPACE_URL, identifier).hex,
        "model_id": name,
        "choices": [choice],
        "tstamp": time.time(),
    }


def write_answers(
    out: Path,
    name: str,
    questions: Sequence[Json],
    numbers: Sequence[int],
    runs: Sequence[Run],
) -> None:
    """Write NAME.jsonl, with _ for each / of a path in the name.

    Args:
      numbers: the question of each run; a question's turns are in order.
    """
    of_question: dict[int, list[Run]] = {}
    for number, run in zip(numbers, runs, strict=True):
        of_question.setdefault(number, []).append(run)
    lines = [
        answer_line(questions[i], turns, name) for i, turns in sorted(of_question.items())
    ]
    file = out / f"{name.replace('/', '_')}.jsonl"
    write_text(file, "".join(json.dumps(line) + "\n" for line in lines))
