"""The line of a table that a drafter gets, from comparisons made up here."""

from types import SimpleNamespace

import pytest

from medusa_jax import Options, Tree
from medusa_jax.api import Result
from medusa_jax.evaluate import speed
from medusa_jax.evaluate.compare import Comparison

QUESTION = {"question_id": 1, "category": "a", "turns": ["in"], "frame": None}


def compared(n_tokens, steps, seconds, plain_seconds):
    """A text of so many tokens, its steps alike."""
    sides = []
    for n_steps in (steps, n_tokens - 1):
        length = (n_tokens - 1) // max(1, n_steps)
        depths = [0, *([*range(1, length), 0] * n_steps)]
        histogram = [n_steps if n + 1 == length else 0 for n in range(4)]
        sides.append(
            Result(
                "x", [3] * n_tokens, depths, "length", 1, n_steps, histogram, 0.1, 0.1, 0
            )
        )
    return Comparison(*sides, seconds, plain_seconds, True, None, 0.1, 0.1)


@pytest.fixture
def row(monkeypatch):
    """The line of made-up comparisons, one a question."""
    model = SimpleNamespace(drafts_by=lambda tree: "medusa")

    def made(*comparisons):
        left = iter(comparisons)
        monkeypatch.setattr(speed, "compare", lambda *_, **__: [next(left)])
        questions = [QUESTION] * len(comparisons)
        return speed.drafting_row(model, questions, Tree.chain(3), Options(), 1)

    return made


def test_a_text_that_ends_at_once_is_no_prompt_of_the_median(row):
    """Its two noises have a quotient, too: 9 here."""
    found = row(
        compared(9, 4, 1.0, 2.0), compared(1, 0, 0.001, 0.009), compared(9, 2, 1.0, 4.0)
    )
    assert found["speedup_median_prompt"] == pytest.approx(3.0)
    assert found["mean_accepted_length"] == pytest.approx(16 / 6)
    assert found["prompts"] == 3


def test_nothing_but_such_texts_is_refused(row):
    with pytest.raises(speed.UserError, match="ended with its first token"):
        row(compared(1, 0, 0.1, 0.1))
