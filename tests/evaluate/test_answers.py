"""Answer files: what each side took and said, and what a later turn stands behind."""

from types import SimpleNamespace as Space

import pytest

from medusa_jax.api import Options
from medusa_jax.evaluate import answering
from medusa_jax.evaluate.answers import answer_line, spec_bench_speedup
from medusa_jax.evaluate.conversation import PLAIN
from medusa_jax.evaluate.race import Run, figures, relation_error
from medusa_jax.tree import Tree

QUESTION = {"question_id": 7, "category": "qa", "turns": ["one", "two"], "frame": None}


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


def turn(scale):
    return Space(
        drafted=result(" drafted\n", 6, [0, 1, 1], 0.25, 0.5 * scale),
        autoregressive=result("plain", 6, [5], 0.125, 1.0 * scale),
    )


def test_both_sides_with_their_own_text_and_whole_time():
    turns = [turn(1), turn(2)]
    drafted, plain = (answer_line(QUESTION, turns, "m", plain=p) for p in (False, True))
    assert drafted["choices"][0] == {
        "index": 0,
        "turns": ["drafted", "drafted"],
        "decoding_steps": [2, 2],
        "new_tokens": [6, 6],
        "wall_time": [0.75, 1.25],
        "accept_lengths": [2, 3, 2, 3],
    }
    assert plain["choices"][0]["wall_time"] == [1.125, 2.125]
    assert plain["choices"][0]["turns"] == ["plain", "plain"]
    assert plain["choices"][0]["accept_lengths"] == [1] * 10
    # 12 tokens in 2 seconds against 2 x (5 ids without the BOS) in 3.25.
    speedup = spec_bench_speedup([drafted], [plain], lambda text: [0, *map(ord, text)])
    assert speedup == pytest.approx((12 / 2) / (10 / 3.25))


def test_a_later_turn_stands_behind_the_drafted_answer(monkeypatch):
    """On both sides alike, and with the noise of its question."""
    asked = []

    def compare(model, prompts, options, *, tree, ids, repeats):
        asked.append(("".join(map(chr, prompts[0])), ids))
        return [turn(1)]

    monkeypatch.setattr(answering, "compare", compare)
    model = Space(encode=lambda text: [*map(ord, text)])
    how = {"repeats": 1, "template": PLAIN, "room": 99}
    answering.answer_all(model, [QUESTION, QUESTION], Tree.none(), Options(), **how)
    assert asked == [("one", [0]), ("one", [1]), ("one\n\ndrafted\n\ntwo", [0]),
                     ("one\n\ndrafted\n\ntwo", [1])]  # fmt: skip


def test_answers_that_end_at_once_have_figures():
    """Prefill gave the end-of-text token: no step was made, nothing is divided by zero."""
    one = turn(1)
    for side in (one.drafted, one.autoregressive):
        side.text, side.token_ids, side.steps = "", [2], 0
        side.acceptance_histogram = [0] * len(side.acceptance_histogram)
    found = figures([Run.of([one.drafted])], [Run.of([one.autoregressive])])
    assert (found["mean_accepted_length"], found["speedup"]) == (0, 0)
    assert relation_error(found["speedup"], 0.0, 2.0) == 0
    assert relation_error(1.5, 3.0, 2.2) == pytest.approx(0.1)
