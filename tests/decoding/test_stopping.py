"""Where rows end: which of the emitted tokens are kept, and why a row ended."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_jax.decoding.stopping import (
    LIMIT,
    NEVER,
    RUNNING,
    STOPPED,
    count_until_end,
    pack_ends,
)

L = 3
counted = jax.jit(count_until_end)  # compiled once: all cases have one shape


def test_packed_as_documented():
    assert pack_ends([[2], [2, 5]]).tolist() == [[2, NEVER], [2, 5]]
    assert pack_ends([[], []], 2).tolist() == [[NEVER] * 2] * 2


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.booleans(), min_size=L, max_size=L), st.integers(1, L), st.integers(1, 5)
)
def test_the_first_end_counts(ends, n, room):
    """Token by token: an end ends the row after itself, else the limit does."""
    count, status = 0, RUNNING
    while status == RUNNING and count < n:
        count += 1
        status = STOPPED if ends[count - 1] else LIMIT if count == room else RUNNING
    got = counted(np.array([ends]), np.array([n]), np.array([room]))
    assert [int(x[0]) for x in got] == [count, status]
