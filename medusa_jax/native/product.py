"""Kernels in panels, and the product with them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.native.blocks import FORMS
from medusa_jax.native.library import library

# Neighbouring outputs that are stored alike: (a name of `FORMS`, how many).
Parts = tuple[tuple[str, int], ...]


def in_panels(kernel_IO: Any, panel: int) -> jax.Array:
    """[inputs, outputs] -> panels of words [n, inputs / per word, panel], filled up with zeros.

    A word of 32 bits holds the weights of consecutive inputs: one float32, two bfloat16 or four
    int8, the first in its lowest bits.

    Example: outputs 0 1 2 of float32 in panels of two: panel 0 holds, input by input, the weights of
    outputs 0 and 1, panel 1 those of output 2 and a zero.
    """
    outputs = kernel_IO.shape[1]
    per_word = 4 // kernel_IO.dtype.itemsize
    padding = ((0, -kernel_IO.shape[0] % per_word), (0, -outputs % panel))
    kernel = jnp.pad(kernel_IO, padding)
    kernel = kernel.reshape(-1, per_word, kernel.shape[1]).swapaxes(1, 2)
    words = lax.bitcast_convert_type(kernel if per_word > 1 else kernel[..., 0], jnp.uint32)
    return words.reshape(words.shape[0], -1, panel).swapaxes(0, 1)


def panel_product(
    x: jax.Array, panels: jax.Array, parts: Parts, scales: jax.Array | None = None
) -> jax.Array:
    """x [..., inputs] times a kernel in panels -> [..., outputs], summed up in float32.

    Every row's sums are taken in the order of the inputs, so that a row comes out the same, bit
    for bit, whatever other rows there are; and weights in blocks give what they do in float32.

    Args:
      panels: `in_panels` of the kernel, or `pack_blocks` of its parts, one after the other.
      parts: how outputs are stored, and how many of them so, in their order.
      scales: [n * panel] float32, by which the outputs are multiplied; None is 1.
    """
    assert library() is not None
    x_RI = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    outputs = sum(n for _, n in parts)
    call = jax.ffi.ffi_call(
        "medusa_product", jax.ShapeDtypeStruct((x_RI.shape[0], outputs), jnp.float32)
    )
    nothing = jnp.zeros((0,), jnp.float32)
    scales = nothing if scales is None else scales
    y_RO = call(x_RI, panels, scales, nothing, **numbered(parts))
    return y_RO.reshape(*x.shape[:-1], outputs)


def numbered(parts: Parts) -> dict[str, np.ndarray]:
    """Parts as the kernels take them."""
    forms, widths = zip(*((FORMS[form], n) for form, n in parts))
    return {"forms": np.array(forms, np.int64), "widths": np.array(widths, np.int64)}


def panel_scales(scales_O: Any, panel: int) -> jax.Array:
    """Scales [outputs] filled up to whole panels."""
    return jnp.pad(scales_O, (0, -np.shape(scales_O)[0] % panel))
