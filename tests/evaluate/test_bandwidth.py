"""The bandwidth figure: the fastest way of reading counts, over all bytes and all calls."""

import jax
import numpy as np
import pytest

from medusa_jax.evaluate import bandwidth


@pytest.mark.parametrize(("n_bytes", "calls"), [(2**27, 4), (2**12, 256)])
@pytest.mark.parametrize(("by_xla", "by_numpy", "best"), [(0.5, 2.0, 0.5), (9.0, 2.0, 2.0)])
def test_the_best_way_counts(monkeypatch, by_xla, by_numpy, best, n_bytes, calls):
    """On a clock that runs only while something is read: so many seconds for the whole array."""
    clock, cores = [0.0], 1

    def reading(seconds):
        def read(x):
            clock[0] += seconds * x.nbytes / n_bytes
            return np.zeros(())

        return read

    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(bandwidth.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(bandwidth, "library", lambda: None)
    monkeypatch.setattr(jax, "jit", lambda function: reading(by_xla))
    monkeypatch.setattr(np, "max", reading(by_numpy))
    assert bandwidth.read_bandwidth(n_bytes, rounds=2) == pytest.approx(n_bytes / best)
    # Two rounds of as many calls as make up half a gigabyte, but 256 at most.
    assert clock[0] == pytest.approx(2 * calls * (by_xla + by_numpy))
