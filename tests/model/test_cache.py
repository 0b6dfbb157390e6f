"""The key/value cache: writing, committing and growing rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_arch

from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.kernels.one_cpu import LayerKernels
from medusa_jax.kernels.tpu import TpuKernels
from medusa_jax.model.cache import KVCache
from medusa_jax.model.kernels import Kernels
from medusa_jax.native import library

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)


native = pytest.mark.skipif(library() is None, reason="no C++ compiler")
ALL = [Kernels(), CpuKernels(), pytest.param(LayerKernels(), marks=native), TpuKernels()]


@pytest.fixture(scope="module", params=ALL, ids=lambda kernels: type(kernels).__name__)
def kernels(request):
    return request.param


@pytest.fixture(scope="module")
def commit(kernels):
    return jax.jit(kernels.commit)


def counting(batch, slots):
    """Every entry of every array its own number."""
    shapes = jax.eval_shape(lambda: KVCache.zeros(tiny_arch(), batch, slots, jnp.float32))
    leaves, structure = jax.tree.flatten(shapes)
    numbers = np.arange(len(leaves) * leaves[0].size, dtype=np.float32)
    return jax.tree.unflatten(structure, numbers.reshape(-1, *leaves[0].shape))


@SETTINGS
@given(st.integers(0, 2**20), st.sampled_from([1, 3]))
def test_commit_is_a_gather(commit, seed, batch):
    rng = np.random.default_rng(seed)
    slots, nodes, length = 24, 7, 4
    start = rng.integers(0, slots - nodes + 1, batch).astype(np.int32)
    below = [rng.permutation(np.arange(1, nodes))[: length - 1] for _ in range(batch)]
    path = np.stack([[0, *sorted(nodes)] for nodes in below]).astype(np.int32)
    before = counting(batch, slots)
    after = commit(before, start, path)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after)):
        expected = np.array(old)
        for row in range(batch):
            moved = np.array(old)[row][:, start[row] + path[row]]
            expected[row, :, start[row] : start[row] + length] = moved
        np.testing.assert_array_equal(new, expected)


def test_a_row_without_room_gets_numbers(commit):
    """Rows that have ended are written, too, and a later text may begin in one of them."""
    start, path = np.array([4, 15], np.int32), np.array([[0, 2, 3]] * 2, np.int32)
    before = counting(2, 16)
    after = commit(before, start, path)
    for old, new in zip(*(map(np.asarray, jax.tree.leaves(c)) for c in (before, after))):
        assert np.isfinite(new).all()
        np.testing.assert_array_equal(new[1, :, :13], old[1, :, :13])


@SETTINGS
@given(st.integers(0, 2**20), st.sampled_from([1, 3]))
def test_rows_are_written_where_each_starts_and_nowhere_else(kernels, seed, batch):
    rng = np.random.default_rng(seed)
    cache = rng.standard_normal((batch, 2, 12, 3)).astype(np.float32)
    rows = rng.standard_normal((batch, 2, 5, 3)).astype(np.float32)
    start = rng.integers(0, 8, batch).astype(np.int32)
    got = jax.jit(kernels.write_rows)(cache, rows, start)
    for row in range(batch):
        cache[row, :, start[row] : start[row] + 5] = rows[row]
    np.testing.assert_array_equal(got, cache)


def test_growing_keeps_what_is_there():
    before = counting(2, 8)
    after = before.grow(20)
    assert (before.slots, after.slots) == (8, 20)
    for old, new in zip(*(map(np.asarray, jax.tree.leaves(c)) for c in (before, after))):
        np.testing.assert_array_equal(new[:, :, :8], old)
        assert not new[:, :, 8:].any()
    assert after.grow(4).slots == 20
    assert KVCache(layers=()).slots == 0
