"""Rotary positions: the scalings as published, the rotation as complex numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from numpy_layers import llama3_divisors
from tiny import tiny_arch

from medusa_jax.kernels.tpu import TpuKernels
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.rope import rope_frequencies, rope_tables

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_scaling": "linear", "rope_factor": 4.0},
        {"rope_scaling": "llama3", "rope_theta": 500000.0, "rope_factor": 8.0}
        | {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0}
        | {"rope_original_max_position": 8192},
    ],
)
def test_rotation_is_that_of_complex_numbers(fields):
    config = tiny_arch(head_dim=64, **fields)
    divisors = np.full(32, config.rope_factor if config.rope_scaling == "linear" else 1)
    if config.rope_scaling == "llama3":  # all three regions are there
        divisors = llama3_divisors(config)
        assert divisors[0] == 1 and divisors[-1] == 8
        assert ((divisors > 1.1) & (divisors < 5)).any()
    expected = config.rope_theta ** -(np.arange(32) / 32) / divisors
    np.testing.assert_allclose(rope_frequencies(config), expected, rtol=1e-12)
    positions = np.array([[0, 1, 7, 5000]])
    x = np.random.default_rng(0).standard_normal((1, 4, 2, 64))
    tables = rope_tables(config, jnp.asarray(positions), jnp.float64)
    got = Kernels().rotate(jnp.asarray(x), *tables)
    angle = positions[0][None, :, None, None] * expected
    turned = (x[..., :32] + 1j * x[..., 32:]) * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag], -1)
    assert_close(got, expected, 5000)  # an angle at position 5000 is that much less exact


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_form_for_tpus_is_exact(dtype):
    config = tiny_arch(head_dim=64)
    tables = rope_tables(config, jnp.array([[0, 1, 7, 500], [3, 2, 1, 0]]), dtype)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 3, 64)), dtype)
    expected = Kernels().rotate(x, *tables)
    got = TpuKernels().rotate(x, *tables)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def test_unknown_rope_scaling_is_an_error():
    with pytest.raises(ValueError, match="ntk"):
        rope_frequencies(tiny_arch(rope_scaling="ntk"))
