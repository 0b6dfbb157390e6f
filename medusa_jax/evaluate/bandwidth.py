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


def read_bandwidth(megabytes: int = 512, rounds: int = 9) -> float:
    """Bytes per second at which this device reads memory: the best of several ways, and of rounds.

    All cores read an array that is several times any cache. One way alone can fall short of the
    machine (XLA's sum takes half of it on some), and no program reads faster than the fastest.
    """
    x = jnp.ones((megabytes * 2**18,), jnp.float32)
    ways: list[Callable[[], Any]] = []
    total = jax.jit(lambda x: jnp.sum(x.reshape(64, -1), axis=1))
    ways.append(lambda: total(x))
    if jax.default_backend() == "cpu":
        halves = np.array_split(np.asarray(x), os.cpu_count() or 1)
        pool = ThreadPoolExecutor(len(halves))
        ways.append(lambda: list(pool.map(np.max, halves)))
        if library() is not None:
            read = jax.jit(read_native)
            ways.append(lambda: read(x))
    best = math.inf
    for _ in range(rounds):
        for way in ways:
            start = time.perf_counter()
            jax.block_until_ready(way())
            best = min(best, time.perf_counter() - start)
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
