"""Figures of a race, from runs made up here."""

import itertools

import pytest

from medusa_jax import UserError
from medusa_jax.evaluate.race import Contender, Run, figures, race


def run(n_tokens, steps, seconds, prefill=0.1):
    """A text of this many tokens, by the device's count of what its steps appended."""
    return Run([[3] * n_tokens], prefill, seconds, steps=steps, appended=n_tokens - 1)


def contender(runs, **row):
    left = iter(runs)
    return Contender("x", lambda prompt: next(left), **row)


def test_a_token_that_no_step_made_shows_in_the_difference():
    own = [Run([[3] * 10], 0.1, 1.0, steps=4, appended=8)]
    assert figures(own, [run(9, 8, 1.0)])["difference"] == pytest.approx(1 / 8)


def test_nothing_but_such_texts_is_refused():
    with pytest.raises(UserError, match="ended with its first token"):
        race([contender([run(1, 0, 0.1)] * 9)], [[7]], 2)


def test_a_contender_may_have_a_baseline_of_its_own():
    """The third is compared with the second; the median of three rounds counts."""
    entered = [
        contender(itertools.repeat(run(9, 8, seconds)), against=i // 2 * 2)
        for i, seconds in enumerate((4.0, 2.0, 1.0))
    ]
    slow = iter([run(9, 8, 99.0), run(9, 8, 0.5), run(9, 8, 0.25)])
    entered.append(Contender("y", lambda prompt: next(slow), against=2))
    rows = race(entered, [[7]], 3, warm_up=False)
    assert [row["speedup"] for row in rows] == [1, 2, 1, 2]


def test_texts_are_compared_with_the_baselines():
    own, plain = Run([[1, 2, 9, 4]], 0.1, 1.0), Run([[1, 2, 3, 4]], 0.1, 1.0)
    found = figures([own, plain], [plain, plain])
    assert (found["divergences"], found["texts"], found["agreement"]) == (1, 2, 0.75)
    # An engine that does not count steps has no figures of steps.
    assert found["mean_accepted_length"] is None and found["step_latency_ratio"] is None
