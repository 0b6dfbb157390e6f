"""The bandwidth figure: what is read, and that no way of reading beats it."""

import time

import jax.numpy as jnp
import numpy as np

from medusa_jax.evaluate.bandwidth import read_bandwidth


def test_no_program_reads_faster():
    """A NumPy maximum of as many bytes on one core, timed here, stays below the figure."""
    found = read_bandwidth(2**24, rounds=3)
    x = np.asarray(jnp.ones((2**22,), jnp.float32))
    best = min(_seconds(lambda: np.max(x)) for _ in range(3))
    assert 1e8 < x.nbytes / best < 1.05 * found


def _seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
