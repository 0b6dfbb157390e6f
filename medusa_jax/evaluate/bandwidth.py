"""What a step of plain decoding must read, and how fast this device reads."""

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import Model
from medusa_jax.native import library, read_native


def read_bandwidth(n_bytes: int = 2**29, rounds: int = 9) -> float:
    """Bytes per second at which this device reads `n_bytes` over and over: the best of several ways.

    All cores read. By default the array is several times any cache, and the figure is that of
    memory; what fits a cache is read from there, as a model of that size is. One way alone can
    fall short of the machine (XLA's sum takes half of it on some), and no program reads faster
    than the fastest.
    """
    x = jnp.ones((max(1, n_bytes // 4),), jnp.float32)
    calls = min(256, max(1, 2**29 // x.nbytes))  # of tiny arrays the calls take long
    total = jax.jit(jnp.sum)
    ways: list[Callable[[], Any]] = [lambda: total(x)]
    if jax.default_backend() == "cpu":
        parts = np.array_split(np.asarray(x), os.cpu_count() or 1)
        pool = ThreadPoolExecutor(len(parts))
        ways.append(lambda: list(pool.map(np.max, parts)))
        if library() is not None:
            read = jax.jit(read_native)
            ways.append(lambda: read(x))
    best = math.inf
    for _ in range(rounds):
        for way in ways:
            start = time.perf_counter()
            for _ in range(calls):
                out = way()
            jax.block_until_ready(out)
            best = min(best, (time.perf_counter() - start) / calls)
    return x.nbytes / best


def bytes_per_token(model: Model, length: int) -> int:
    """Bytes that one autoregressive step must read: all weights but the embedding table, the
    cached keys and values of `length` positions, and one row of the embedding."""
    weights = dict(model.variables["backbone"])
    embedding = weights.pop("embed_tokens")["embedding"]
    total = sum(x.nbytes for x in jax.tree.leaves(weights))
    c = model.config
    cached = 2 * c.n_layers * c.n_kv_heads * c.head_dim * length * embedding.dtype.itemsize
    return total + cached + c.d_model * embedding.dtype.itemsize
