"""The TPU kernel of tree attention, interpreted, against `attend`."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from trees import random_tree

from medusa_jax.model import tpu
from medusa_jax.model.attention import attend
from medusa_jax.model.masks import tree_mask


def inputs(rng, B, T, N, G, S, H=128):
    q_BTNH, k_BGSH, v_BGSH = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((B, T, N, H), (B, G, S, H), (B, G, S, H))
    )
    # Slots after the last used one may hold anything.
    start_B = jnp.asarray(rng.integers(0, S - T, size=B), jnp.int32).at[0].set(0)
    return q_BTNH, k_BGSH, v_BGSH, start_B


@pytest.mark.parametrize(
    "B, T, N, G, S, window",
    [
        (2, 9, 4, 2, 384, 0),
        (3, 17, 2, 2, 256, 40),
        *wide((1, 64, 8, 2, 1024, 0), (2, 16, 12, 12, 128, 0), (2, 33, 6, 2, 1536, 100)),
    ],
)
def test_is_attend_for_random_trees_and_ragged_rows(B, T, N, G, S, window):
    rng = np.random.default_rng(T)
    q_BTNH, k_BGSH, v_BGSH, start_B = inputs(rng, B, T, N, G, S)
    own_TT = random_tree(rng, T, 4).mask_MM
    mask_BTS = tree_mask(S, start_B, jnp.asarray(own_TT))
    if window:
        depth_T = own_TT.sum(axis=1)
        oldest_BT = start_B[:, None] + depth_T[None, :] - window
        of_text_BTS = jnp.arange(S)[None, None] < start_B[:, None, None]
        near_BTS = jnp.arange(S)[None, None] > oldest_BT[:, :, None]
        mask_BTS = mask_BTS & (near_BTS | ~of_text_BTS)
    expected = attend(q_BTNH, k_BGSH, v_BGSH, mask_BTS)
    # Blocks of slots after the last used one are not read.
    size = next(size for size in tpu.BLOCKS if S % size == 0)
    unread_BS = np.arange(S)[None] // size > (np.asarray(start_B)[:, None] + T - 1) // size
    junk = (jnp.where(unread_BS[:, None, :, None], jnp.nan, x) for x in (k_BGSH, v_BGSH))
    found = tpu.attend_tree(q_BTNH, *junk, mask_BTS, start_B + T, interpret=True)
    assert_close(found, expected, roundings=64)
