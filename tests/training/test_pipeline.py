"""The input pipeline: what a step reads is a function of its number."""

import threading

import numpy as np
import pytest

from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError
from medusa_jax.training.data import pipeline
from medusa_jax.training.data.rows import TokenRows


def rows_of(tokens, **fields):
    return TokenRows(tokens, DataConfig(seq_len=16, packing="concat", **fields), 64)


def test_steps_in_order_and_resumed_anywhere(tokens):
    """Through several epochs: the batches of the rows themselves, from whatever step on."""
    rows = rows_of(tokens)
    last = 3 * rows.rows // 8
    for first in (1, 2, last - 3):
        read = list(pipeline.batches(rows, 8, first, last))
        assert len(read) == last - first + 1
        for n, batch in enumerate(read, first):
            expected = rows_of(tokens).batch((n - 1) * 8, 8)
            for name, x in expected.items():
                np.testing.assert_array_equal(batch[name], x)


def test_a_process_reads_its_own_rows(tokens):
    """Two microbatches of four rows, of which this process has the last two each."""
    own = np.array([2, 3, 6, 7])
    for n, batch in enumerate(pipeline.batches(rows_of(tokens), 8, 3, 5, own), 3):
        whole = rows_of(tokens).batch((n - 1) * 8, 8)
        for name, x in whole.items():
            np.testing.assert_array_equal(batch[name], x[own])


def test_batches_are_read_ahead_in_other_threads(tokens):
    seen = set()

    class Watched(TokenRows):
        def batch(self, first, n):
            seen.add(threading.current_thread().name)
            return super().batch(first, n)

    rows = Watched(tokens, DataConfig(seq_len=16, packing="concat"), 64)
    assert len(list(pipeline.batches(rows, 8, 1, 12))) == 12
    assert threading.current_thread().name not in seen


def test_what_goes_wrong_while_reading_reaches_the_run(tokens):
    class Broken(TokenRows):
        def batch(self, first, n):
            raise UserError("tokens.npy has gone")

    rows = Broken(tokens, DataConfig(seq_len=16, packing="concat"), 64)
    with pytest.raises(UserError, match=r"tokens\.npy has gone"):
        list(pipeline.batches(rows, 8, 1, 3))
