"""Attention over whole rows in blocks, and for one token, equals the plain one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

from medusa_jax.model.attention import attend, attend_causal, attend_one
from medusa_jax.model.cache import write_rows

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("T", [1, 64, 65, 130, 600])
def test_blocks_of_queries_give_what_one_attention_gives(T):
    """Values and gradients, over packed rows with a window; 600 tokens are eight blocks."""
    rng = np.random.default_rng(T)
    q = rng.standard_normal((1, T, 2, 4))
    k, v = rng.standard_normal((2, 1, 1, T, 4))
    segment, row = np.sort(rng.integers(0, 3, T)), np.arange(T)
    mask = (segment[:, None] == segment[None]) & (row[:, None] >= row[None])
    mask = (mask & (row[:, None] - row[None] < 90))[None]
    weight = rng.standard_normal((1, T, 8))

    def total(see, *qkv):
        out = see(*qkv, mask)
        return (out * weight).sum(), out

    results = [
        jax.jit(jax.value_and_grad(partial(total, see), (0, 1, 2), has_aux=True))(q, k, v)
        for see in (attend, attend_causal)
    ]
    # All gradients as one array: those of a single token's query and key are zero but for rounding.
    assert_close(
        *((value, jnp.concatenate([x.ravel() for x in grads])) for value, grads in results)
    )


@pytest.mark.parametrize("start", [0, 3, 9])
def test_one_token_behind_a_cache_sees_it_and_itself(start):
    """What `attend` gives once the token's key and value are in the cache; slots behind are junk."""
    rng = np.random.default_rng(start)
    q = jnp.asarray(rng.standard_normal((2, 1, 4, 6)))
    cache = tuple(jnp.asarray(x) for x in rng.standard_normal((2, 2, 2, 10, 6)))
    new = tuple(jnp.asarray(x) for x in rng.standard_normal((2, 2, 2, 1, 6)))
    start_B = jnp.array([start, max(start - 1, 0)])
    mask_B1S = (jnp.arange(10)[None, :] <= start_B[:, None])[:, None, :]
    written = [write_rows(c, n, start_B) for c, n in zip(cache, new)]
    expected = attend(q, *written, mask_B1S)
    assert_close(attend_one(q, new, cache, start_B, mask_B1S), expected)
