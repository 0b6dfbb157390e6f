"""Rotary positions: the scalings as published, the rotation as complex numbers."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from tiny import tiny_arch

from medusa_jax.config import LlamaConfig
from medusa_jax.model import seams
from medusa_jax.model.rope import rope_frequencies, rope_tables, rotate

pytestmark = pytest.mark.usefixtures("x64")


def rotation_reference(config: LlamaConfig, plane: int) -> float:
    """Radians per position of one plane, by the wavelengths that the Llama 3 config names."""
    wavelength = 2 * math.pi * config.rope_theta ** (2 * plane / config.head_dim)
    if config.rope_scaling == "linear":
        return 2 * math.pi / (wavelength * config.rope_factor)
    if config.rope_scaling == "llama3":
        longest = config.rope_original_max_position / config.rope_low_freq_factor
        shortest = config.rope_original_max_position / config.rope_high_freq_factor
        if wavelength > longest:
            wavelength *= config.rope_factor
        elif wavelength > shortest:
            turns = config.rope_original_max_position / wavelength
            low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
            smooth = (turns - low) / (high - low)
            kept = 2 * math.pi / wavelength
            return (1 - smooth) * kept / config.rope_factor + smooth * kept
    return 2 * math.pi / wavelength


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
    expected = [rotation_reference(config, plane) for plane in range(32)]
    np.testing.assert_allclose(rope_frequencies(config), expected, rtol=1e-12)
    if config.rope_scaling == "llama3":  # all three regions are there
        plain = rope_frequencies(dataclasses.replace(config, rope_scaling="none"))
        ratio = np.array(expected) / plain
        assert ratio[0] == 1 and np.isclose(ratio[-1], 1 / 8)
        assert ((ratio > 0.2) & (ratio < 0.9)).any()
    positions = np.array([[0, 1, 7, 5000]])
    x = np.random.default_rng(0).standard_normal((1, 4, 2, 64))
    got = np.asarray(
        rotate(jnp.asarray(x), *rope_tables(config, jnp.asarray(positions), jnp.float64))
    )
    turned = (x[..., :32] + 1j * x[..., 32:]) * np.exp(
        1j * positions[0][None, :, None, None] * np.array(expected)
    )
    expected = np.concatenate([turned.real, turned.imag], -1)
    assert_close(got, expected, 5000)  # an angle at position 5000 is that much less exact


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_form_for_tpus_is_exact(monkeypatch, dtype):
    config = tiny_arch(head_dim=64)
    tables = rope_tables(config, jnp.array([[0, 1, 7, 500], [3, 2, 1, 0]]), dtype)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 3, 64)), dtype)
    expected = rotate(x, *tables)
    monkeypatch.setattr(seams, "platform", lambda: "tpu")
    got = rotate(x, *tables)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def test_unknown_rope_scaling_is_an_error():
    with pytest.raises(ValueError, match="longrope"):
        rope_frequencies(tiny_arch(rope_scaling="longrope"))
