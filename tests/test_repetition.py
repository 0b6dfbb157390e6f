"""Repeated n-grams, against their definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_jax.repetition import mean_repeated_ngram_share, repeated_ngram_share


def test_worked_examples():
    assert repeated_ngram_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(0.2)
    assert repeated_ngram_share([7] * 6) == pytest.approx(2 / 3)
    assert repeated_ngram_share([1, 2, 3]) == 0.0
    assert mean_repeated_ngram_share([[7] * 6, [1, 2, 3]]) == pytest.approx(1 / 3)
    assert mean_repeated_ngram_share([]) == 0.0


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 5))
def test_repeated_share_is_what_it_says(tokens, n):
    seen, repeats, total = set(), 0, 0
    for i in range(len(tokens) - n + 1):
        gram = tuple(tokens[i : i + n])
        repeats += gram in seen
        seen.add(gram)
        total += 1
    assert repeated_ngram_share(tokens, n) == pytest.approx(repeats / total if total else 0)
