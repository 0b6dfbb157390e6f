"""A causal layer that is asked for one row: its output, with the keys and values of all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from tiny import tiny_arch

from medusa_jax.heads.layers import CausalLayer, LayerState

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("T", [1, 5, 20])  # 20 rows are scored as a prompt is
def test_one_row_is_that_row_of_all(T):
    config, key = tiny_arch(), jax.random.key(0)
    layer = CausalLayer(config, jnp.float64)
    x_BTD = jax.random.normal(key, (2, T + 4, config.d_model))
    positions_BT = jnp.tile(jnp.arange(T + 4), (2, 1))
    params = layer.init(
        key, x_BTD, positions_BT, jnp.ones((2, T + 4), int), method="forward"
    )
    [text] = LayerState.zeros(config, 1, 2, 32, jnp.float64).cache.layers

    def decode(text, rows, start, only=None):
        start_B = jnp.full((2,), start)
        given = (x_BTD[:, rows], positions_BT[:, rows], text, start_B, only)
        return layer.apply(params, *given, method="decode")

    _, text = decode(text, slice(4), 0)
    all_BTD, written = decode(text, slice(4, None), 4)
    only_B = jnp.array([T - 1, T // 2])
    one_B1D, same = decode(text, slice(4, None), 4, only_B)
    assert one_B1D.shape == (2, 1, config.d_model)
    assert_close(one_B1D[:, 0], np.asarray(all_BTD)[[0, 1], only_B])
    jax.tree.map(np.testing.assert_array_equal, same, written)
