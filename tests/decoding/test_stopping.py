"""Where rows end: stop sequences as one array, against a plain search through the text."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_jax.decoding.stopping import (
    ANY,
    LIMIT,
    NEVER,
    RUNNING,
    STOPPED,
    completes_stop,
    count_until_end,
    pack_stops,
)

TOKEN = st.integers(0, 2)
B, L, MOST_BEFORE = 2, 3, 4
# Compiled once: all cases are brought to one shape.
completes, counted = jax.jit(completes_stop), jax.jit(count_until_end)


def test_packed_as_documented():
    packed = pack_stops([[(2,)], [(2,), (5, 7)]]).tolist()
    assert packed == [[[ANY, 2], [NEVER, NEVER]], [[ANY, 2], [5, 7]]]
    assert pack_stops([[], []]).tolist() == [[[NEVER]], [[NEVER]]]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_stop_is_found_where_the_text_ends_with_it(data):
    rows = [
        data.draw(st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=2))
        for _ in range(B)
    ]
    before = [data.draw(st.lists(TOKEN, max_size=MOST_BEFORE)) for _ in range(B)]
    emitted = [data.draw(st.lists(TOKEN, min_size=L, max_size=L)) for _ in range(B)]
    # Two sequences of three tokens that are never met make every case one shape.
    packed = pack_stops([[*row, (9, 9, 9), (9, 9, 9)][:2] for row in rows])
    tokens_BO = np.full((B, MOST_BEFORE + L), 1, np.int32)  # what comes after is no matter
    for b in range(B):
        text = before[b] + emitted[b]
        tokens_BO[b, : len(text)] = text
    n_new_B = np.array([len(x) for x in before])
    found = np.asarray(completes(packed, tokens_BO, np.array(emitted), n_new_B))
    for b in range(B):
        text = before[b] + emitted[b]
        for i in range(L):
            so_far = text[: len(before[b]) + i + 1]
            assert found[b, i] == any(so_far[-len(s) :] == s for s in rows[b])


def test_nothing_stands_before_the_first_new_token():
    """A stop of two equal tokens is met by the second of them."""
    never = (9, 9, 9)
    packed = pack_stops([[(1, 1), never], [never, never]])
    tokens_BO = np.full((B, MOST_BEFORE + L), 1, np.int32)
    found = completes(packed, tokens_BO, tokens_BO[:, :L], np.array([0, 0]))
    assert found.tolist() == [[False, True, True], [False] * L]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.booleans(), min_size=L, max_size=L), st.integers(1, L), st.integers(1, 5)
)
def test_the_first_end_counts(stops, n, room):
    """Token by token: a stop ends the row after itself, else the limit does."""
    count, status = 0, RUNNING
    while status == RUNNING and count < n:
        count += 1
        status = STOPPED if stops[count - 1] else LIMIT if count == room else RUNNING
    got = counted(np.array([stops]), np.array([n]), np.array([room]))
    assert [int(x[0]) for x in got] == [count, status]
