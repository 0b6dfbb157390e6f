"""The product of activations and kernels on every platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close

from medusa_jax.model import product as room

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(1, 24), (1, 1, 24), (24,), (3, 24)])
@pytest.mark.parametrize("outputs", [(10,), (2, 5)])
def test_a_row_is_multiplied_among_others_on_cuda(monkeypatch, shape, outputs):
    """The same values and gradients; one row is the first of several, so that no sum is made of it."""
    x = jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16)
    kernel = jnp.asarray(RNG.standard_normal((24, *outputs)), jnp.bfloat16)

    def value(x, kernel):
        return jnp.sum(jnp.sin(room.product(x, kernel)))

    expected = jax.grad(value, argnums=(0, 1))(x, kernel)
    monkeypatch.setattr(room, "platform", lambda: "cuda")
    wide = (np.asarray(a, np.float32) for a in (x, kernel))
    assert_close(room.product(x, kernel), np.tensordot(*wide, 1))
    for got, wanted in zip(jax.grad(value, argnums=(0, 1))(x, kernel), expected):
        np.testing.assert_array_equal(got, wanted)
    text = jax.jit(room.product).lower(x, kernel).as_text()
    one_row = np.prod(shape[:-1], dtype=int) == 1
    assert (f"tensor<{room.CUDA_ROWS}x24x" in text) == one_row
    assert ("optimization_barrier" in text) == one_row
    wide = jax.jit(room.product).lower(x.astype(jnp.float32), kernel.astype(jnp.float32))
    assert f"tensor<{room.CUDA_ROWS}x24x" not in wide.as_text()  # not measured
