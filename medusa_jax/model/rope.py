"""Rotary position embedding, plain and with the scalings of Llama 2 and 3, of YaRN and of LongRoPE."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.model.product import at_least_f32


def rope_frequencies(config: LlamaConfig, rotation: str = "text") -> np.ndarray:
    """Rotation per position of each of the H/2 planes, [H/2] float64; 0 for planes that are not rotated.

    `rotation` is as `LlamaConfig.rotation` gives it.
    """
    frequency = np.zeros(config.head_dim // 2)
    H = config.rope_dim or config.head_dim
    half = np.arange(0, H, 2, dtype=np.float64) / H
    if rotation == "window":
        frequency[: H // 2] = config.rope_window_theta**-half
    elif rotation == "text":
        frequency[: H // 2] = _scaled(config, H, config.rope_theta**-half)
    return frequency


def _scaled(config: LlamaConfig, H: int, frequency: np.ndarray) -> np.ndarray:
    """Scaled frequencies of H rotated components.

    "linear" divides all by the factor, "longrope" each by its own. "llama3" and "yarn" divide the low frequencies,
    keep the high ones and interpolate in between: by a plane's number of turns in the original context ("llama3")
    or by its index ("yarn"). "dynamic" changes frequencies only beyond the context.
    """
    original = config.rope_original_max_position
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if config.rope_scaling in ("none", "dynamic"):
        return frequency
    if config.rope_scaling == "longrope":
        is_long = config.max_position > original
        return frequency / np.array(config.rope_long if is_long else config.rope_short)
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
    config: LlamaConfig, positions_BT: jax.Array, dtype: DTypeLike, rotation: str = "text"
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position's angles, each [B, T, 1, H] (both halves alike).

    With "yarn" and "longrope" they are multiplied by their factor, which multiplies scores by its square.
    """
    wide = at_least_f32(dtype)
    frequency = np.tile(rope_frequencies(config, rotation), 2)[None, None, None, :]
    angle = positions_BT.astype(wide)[..., None, None] * jnp.asarray(frequency, wide)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if config.rope_attention_factor != 1 and rotation == "text":
        factor = np.where(frequency, config.rope_attention_factor, 1.0)
        cos, sin = cos * jnp.asarray(factor, wide), sin * jnp.asarray(factor, wide)
    return cos, sin
