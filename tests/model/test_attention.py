"""Attention over whole rows in blocks and after a cache equals the plain one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close

from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.model import running_softmax
from medusa_jax.model.grouped import attend
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.masks import CausalMask

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("kernels", [CpuKernels(), *wide(Kernels())])
@pytest.mark.parametrize("T", [*wide(1, 64), 65, *wide(130, 256), 400, 600])
def test_blocks_of_queries_give_what_one_attention_gives(T, kernels):
    """Values and gradients, over packed rows with a window."""
    rng = np.random.default_rng(T)
    q = rng.standard_normal((2, T, 2, 4))
    k, v = rng.standard_normal((2, 2, 1, T, 4))
    segment, row = np.sort(rng.integers(0, 3, T)), np.arange(T)
    mask = (segment[:, None] == segment[None]) & (row[:, None] >= row[None])
    mask = (mask & (row[:, None] - row[None] < 90))[None]
    weight = rng.standard_normal((2, T, 8))
    segments = np.stack([segment, segment])

    def total(attend, mask, *qkv):
        out = attend(*qkv, mask)
        return (out * weight).sum(), out

    results = [
        jax.jit(jax.value_and_grad(partial(total, *see), (0, 1, 2), has_aux=True))(q, k, v)
        for see in ((attend, mask), (kernels.attend_text, CausalMask(segments, 90)))
    ]
    # All gradients as one array: those of a single token's query and key are zero but for rounding.
    flat = [(x, np.concatenate(list(map(np.ravel, grads)))) for x, grads in results]
    assert_close(*flat, roundings=512)


def test_memory_of_a_gradient_grows_with_the_length_of_the_row():
    """Temporaries, forward and backward, in units of one float64 array of the queries' size."""

    def temporaries(T):
        q = jax.ShapeDtypeStruct((1, T, 4, 64), jnp.float64)
        kv = jax.ShapeDtypeStruct((1, 2, T, 64), jnp.float64)
        segments = jax.ShapeDtypeStruct((1, T), jnp.int32)

        def total(q, k, v, segments):
            return CpuKernels().attend_text(q, k, v, CausalMask(segments)).sum()

        run = jax.jit(jax.grad(total, (0, 1, 2)))
        memory = run.lower(q, kv, kv, segments).compile().memory_analysis()
        return memory.temp_size_in_bytes / (T * 4 * 64 * 8)

    short, long = temporaries(1024), temporaries(8192)
    assert long < short
    assert long < 16


@pytest.mark.parametrize("window, first", [(0, 0), (70, 0), (70, 190)])
@pytest.mark.parametrize(
    "T, kernels", [(3, CpuKernels()), (300, CpuKernels()), (300, Kernels())]
)
def test_a_text_after_a_cache_sees_it_and_itself(T, kernels, window, first, monkeypatch):
    """What `attend` gives over the written cache: ragged starts, a last block that overlaps.

    In the last case no row sees the first block of slots.
    """
    monkeypatch.setattr(running_softmax, "SLOTS", 64)
    S, rng = 500, np.random.default_rng(T)
    q = jnp.asarray(rng.standard_normal((3, T, 4, 6)))
    cache = tuple(jnp.asarray(x) for x in rng.standard_normal((2, 3, 2, S, 6)))
    new = tuple(jnp.asarray(x) for x in rng.standard_normal((2, 3, 2, T, 6)))
    start_B = np.array([first, first + 10, S - T])
    at_BT = start_B[:, None] + np.arange(T)[None]
    behind_BTS = at_BT[..., None] - np.arange(S)[None, None]
    mask_BTS = (behind_BTS >= 0) & (behind_BTS < (window or S))
    expected = attend(q, *kernels.write_both(cache, new, start_B), mask_BTS)
    run = jax.jit(partial(kernels.attend_prompt, window=window))
    got = run(q, new, cache, start_B)
    assert_close(got, expected)
