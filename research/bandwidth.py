"""The read bandwidth of this device."""

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Bytes of the largest array that is read, and reads in a program on accelerators.
LARGEST, READS = 2**30, 16


def read_bandwidth(n_bytes: int = 2**29, rounds: int = 9) -> float:
    """Bytes per second at which this device repeatedly reads `n_bytes`: the best of several methods.

    All cores read. The default array is several times any cache, so the result is memory bandwidth;
    an array that fits a cache is read from there, as a model of that size is. A single method can
    fall short of the hardware (XLA's sum reaches half of it on some machines).
    """
    x = jnp.ones((min(LARGEST, max(4, n_bytes)) // 4,), jnp.float32)
    times = min(256, max(1, 2**29 // x.nbytes))  # capped, since tiny arrays are call-bound
    if (
        jax.default_backend() != "cpu"
    ):  # all in one program, since a call takes as long as 0.3 GB

        @jax.jit
        def total(x: jax.Array) -> jax.Array:
            # Each sum depends on the one before, or XLA would read the array once.
            def one(_: jax.Array, last: jax.Array) -> jax.Array:
                return jnp.sum(jnp.where(last < 0, 0, x))

            return lax.fori_loop(0, READS * times, one, jnp.zeros(()))

        return READS * times * x.nbytes / _best([lambda: total(x)], rounds, 1)
    sum_once = jax.jit(jnp.sum)
    ways: list[Callable[[], object]] = [lambda: sum_once(x)]
    parts = np.array_split(np.asarray(x), os.cpu_count() or 1)
    pool = ThreadPoolExecutor(len(parts))
    ways.append(lambda: list(pool.map(np.max, parts)))
    return times * x.nbytes / _best(ways, rounds, times)


def _best(ways: Sequence[Callable[[], object]], rounds: int, calls: int) -> float:
    """Fewest seconds of `calls` calls in sequence; the first round compiles."""
    best = math.inf
    for _ in range(rounds):
        for way in ways:
            start = time.perf_counter()
            for _ in range(calls):
                out = way()
            jax.block_until_ready(out)
            best = min(best, time.perf_counter() - start)
    return best
