"""Answer files, and figures of runs without a step."""

from types import SimpleNamespace as Space

import pytest
from files import read_lines

from medusa_jax.evaluate.race import Run, figures, relation_error
from research.questions import write_answers

QUESTIONS = [{"question_id": 7, "category": "qa"}, {"question_id": 9, "category": "math"}]


def result(text, new_tokens, histogram, prefill_seconds, decode_seconds):
    return Space(
        text=text,
        new_tokens=new_tokens,
        token_ids=[3] * new_tokens,
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        steps=sum(histogram),
        acceptance_histogram=histogram,
        accepted_lengths=[n for n, times in enumerate(histogram, 1) for _ in range(times)],
    )


def test_turns_of_a_question_are_one_line_with_their_whole_time(tmp_path):
    """Runs come turn by turn: both first turns, then the second of the first question."""
    runs = [
        Run.of([result(f" text {i}\n", 6, [0, 1, 1], 0.25, 0.5 * i)]) for i in (1, 2, 3)
    ]
    write_answers(tmp_path, "m", QUESTIONS, [0, 1, 0], runs)
    first, second = read_lines(tmp_path / "m.jsonl")
    assert first["choices"][0] == {
        "index": 0,
        "turns": ["text 1", "text 3"],
        "decoding_steps": [2, 2],
        "new_tokens": [6, 6],
        "wall_time": [0.75, 1.75],
        "accept_lengths": [2, 3, 2, 3],
    }
    assert (first["question_id"], first["category"], first["model_id"]) == (7, "qa", "m")
    assert second["question_id"] == 9 and second["choices"][0]["turns"] == ["text 2"]


def test_answers_that_end_at_once_have_figures():
    """Prefill gave the end-of-text token: no step was made, nothing is divided by zero."""
    runs = [Run.of([result("", 1, [0, 0], 0.1, 0.001)])]
    found = figures(runs, runs)
    assert (found["mean_accepted_length"], found["speedup"]) == (0, 0)
    assert relation_error(found["speedup"], 0.0, 2.0) == 0
    assert relation_error(1.5, 3.0, 2.2) == pytest.approx(0.1)
