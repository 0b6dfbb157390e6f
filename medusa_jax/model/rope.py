"""Rotary position embedding, plain and with the scalings of Llama 2 and 3 and of YaRN."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.devices.platforms import platform
from medusa_jax.model.product import at_least_f32


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Rotation per position of each of the H/2 planes, [H/2] float64.

    "linear" divides all by the factor. "llama3" and "yarn" divide the slow ones, keep the fast ones and
    interpolate between, by the number of turns of a plane in the original context length ("llama3") or by
    the plane's number ("yarn"). "dynamic" changes them beyond the context only.
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
        last += 0.001 * (first == last)
        keep = 1 - np.clip((np.arange(H // 2) - first) / (last - first), 0.0, 1.0)
    else:
        raise ValueError(f"unknown rope_scaling {config.rope_scaling!r}")
    return frequency * keep + frequency / config.rope_factor * (1 - keep)


def rope_tables(
    config: LlamaConfig, positions_BT: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position's angles, each [B, T, 1, H] (both halves alike).

    With "yarn" they are multiplied by its factor, so that scores are by its square.
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
    if platform() == "tpu":
        return _rotate_heads(x_BTNH, cos_BT1H, sin_BT1H)
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    swapped = jnp.concatenate([-second, first], axis=-1)
    wide = x_BTNH.astype(cos_BT1H.dtype)
    return (wide * cos_BT1H + swapped.astype(cos_BT1H.dtype) * sin_BT1H).astype(
        x_BTNH.dtype
    )


def _rotate_heads(x_BTNH: jax.Array, cos_BT1H: jax.Array, sin_BT1H: jax.Array) -> jax.Array:
    """`rotate` for TPUs: by head, as attention reads them, and with the halves swapped by a product.

    A half of 128 lanes is no whole tile, so slices of halves are laid out again, twice. A column of the
    product has one term of weight 1 or -1, which is exact.
    """
    H = x_BTNH.shape[-1]
    swap_HH = np.roll(np.eye(H), H // 2, axis=1)
    swap_HH[H // 2 :] *= -1
    x_BNTH, cos_B1TH, sin_B1TH = (
        x.transpose(0, 2, 1, 3) for x in (x_BTNH, cos_BT1H, sin_BT1H)
    )
    swapped = lax.dot_general(
        x_BNTH,
        jnp.asarray(swap_HH, x_BNTH.dtype),
        (((3,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=cos_BT1H.dtype,
    )
    turned = x_BNTH.astype(cos_BT1H.dtype) * cos_B1TH + swapped * sin_B1TH
    return turned.astype(x_BTNH.dtype).transpose(0, 2, 1, 3)
