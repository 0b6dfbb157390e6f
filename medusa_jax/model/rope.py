"""Rotary position embedding, plain and with the scalings of Llama 2 and 3 and of YaRN."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.model.product import at_least_f32


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Rotation per position of each of the H/2 planes, [H/2] float64.

    "linear" divides all by the factor. "llama3" and "yarn" divide the low frequencies, keep the high ones and
    interpolate in between: by a plane's number of turns in the original context ("llama3") or by its index
    ("yarn"). "dynamic" changes frequencies only beyond the context.
    """
    H, original = config.head_dim, config.rope_original_max_position
    half = np.arange(0, H, 2, dtype=np.float64) / H
    frequency = config.rope_theta**-half
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if config.rope_scaling in ("none", "dynamic"):
        return frequency
    if config.rope_scaling == "linear":
        return frequency / config.rope_factor
    if config.rope_scaling == "llama3":
        turns = original * frequency / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    elif config.rope_scaling == "yarn":
        waves = np.log(original / (np.array([high, low]) * 2 * math.pi))
        planes = H * waves / (2 * math.log(config.rope_theta))
        fast, slow = np.clip(planes, -H, 2 * H).tolist()
        if config.rope_truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        first, last = max(fast, 0), min(slow, H - 1)
        if first == last:
            last += 0.001
        keep = 1 - np.clip((np.arange(H // 2) - first) / (last - first), 0.0, 1.0)
    else:
        raise ValueError(f"unknown rope_scaling {config.rope_scaling!r}")
    return frequency * keep + frequency / config.rope_factor * (1 - keep)


def rope_tables(
    config: LlamaConfig, positions_BT: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position's angles, each [B, T, 1, H] (both halves alike).

    With "yarn" they are multiplied by its factor, which multiplies scores by its square.
    """
    wide = at_least_f32(dtype)
    frequency = jnp.asarray(np.tile(rope_frequencies(config), 2), wide)
    angle = positions_BT.astype(wide)[..., None, None] * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if (factor := config.rope_attention_factor) != 1:
        cos, sin = cos * factor, sin * factor
    return cos, sin


def rotate(x_BTNH: jax.Array, cos_BT1H: jax.Array, sin_BT1H: jax.Array) -> jax.Array:
    """Rotary position embedding; plane i pairs components i and i + H/2."""
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    swapped = jnp.concatenate([-second, first], axis=-1)
    wide = x_BTNH.astype(cos_BT1H.dtype)
    return (wide * cos_BT1H + swapped.astype(cos_BT1H.dtype) * sin_BT1H).astype(
        x_BTNH.dtype
    )
