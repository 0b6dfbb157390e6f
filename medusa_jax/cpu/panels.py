"""Kernels in panels, and products with them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from medusa_jax.cpu.library import library
from medusa_jax.model.stored import Stored

# Forms of weights in panels; see `enum Form` in cpu/blocks.h.
FORMS = {"float32": 1, "bfloat16": 2, "int8": 4} | {
    name: 16 + i
    for i, name in enumerate(
        ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
    )
}
# Neighbouring outputs that are stored alike: (a name of `FORMS`, their number).
Parts = tuple[tuple[str, int], ...]


class Panels(Stored):
    """A kernel in panels of words.

    Attributes:
      panels: `in_panels` of the kernel, or `pack_blocks` of its parts, one after the other.
      scales: [n * panel] float32, by which the outputs are multiplied; None is 1.
      parts: the forms of outputs and their numbers, in their order.
      inputs: weights of an output.
    """

    panels: jax.Array
    scales: jax.Array | None
    parts: Parts = struct.field(pytree_node=False)
    inputs: int = struct.field(pytree_node=False)

    @property
    def types(self) -> dict[str, int]:
        return {form: n * self.inputs for form, n in self.parts}

    def product(self, x: jax.Array) -> jax.Array:
        return panel_product(x, self.panels, self.parts, self.scales)

    def rows(self, tokens: jax.Array) -> jax.Array:
        [(form, outputs)] = self.parts
        shape = jax.ShapeDtypeStruct((tokens.size, self.inputs), jnp.float32)
        call: Any = jax.ffi.ffi_call("medusa_rows", shape)
        given = tokens.reshape(-1).astype(jnp.int32), self.panels
        y = call(*given, form=np.int64(FORMS[form]), outputs=np.int64(outputs))
        return y.reshape(*tokens.shape, self.inputs)


def panels(kernel_IO: jax.Array, scales_O: jax.Array | None, panel: int) -> Panels:
    """`Engine.panels`: a kernel in panels of `panel` outputs."""
    scales = scales_O
    if scales is not None:
        scales = jnp.pad(scales, (0, -scales.shape[0] % panel))
    parts = ((kernel_IO.dtype.name, kernel_IO.shape[1]),)
    return Panels(in_panels(kernel_IO, panel), scales, parts, kernel_IO.shape[0])


def in_panels(kernel_IO: Any, panel: int) -> jax.Array:
    """[inputs, outputs] -> panels of words [n, inputs / per word, panel], filled up with zeros.

    A word of 32 bits holds the weights of consecutive inputs: one float32, two bfloat16 or four
    int8, the first in its lowest bits.

    Example: outputs 0 1 2 of float32 in panels of two: panel 0 holds, input by input, the weights of
    outputs 0 and 1, panel 1 the weights of output 2 and a zero.
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

    Every row's sums are taken in the order of the inputs, so a row comes out the same, bit for
    bit, with any other rows; and weights in blocks give the same sums as in float32.

    Args: fields of `Panels`.
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
