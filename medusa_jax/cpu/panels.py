"""Kernels in panels, and products with them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from medusa_jax.compiler import FORMS
from medusa_jax.model.stored import Product, Storage, Stored

# Outputs of a panel of int8 or of blocks, and inputs of a block.
WIDE, BLOCK = 32, 32


class Panels(Stored):
    """A kernel in panels of words.

    Attributes:
      panels: words as `in_panels`, `in_blocks` or `blocks.pack` make them.
      scales: [n * panel] float32, by which the outputs are multiplied; None is 1.
      form: the name of the form of its weights.
      inputs, outputs: the shape of the kernel.
      activations: bits of the activations that int8 and blocks are multiplied by.
    """

    panels: jax.Array
    scales: jax.Array | None
    form: str = struct.field(pytree_node=False)
    inputs: int = struct.field(pytree_node=False)
    outputs: int = struct.field(pytree_node=False)
    activations: int = struct.field(pytree_node=False)

    @property
    def types(self) -> dict[str, int]:
        return {self.form: self.inputs * self.outputs}

    def product(self, x: jax.Array, product: Product | None = None) -> jax.Array:
        """x [..., inputs] times the kernel -> [..., outputs], summed in float32.

        Every row is summed in the order of the inputs, so its result is the same, bit for bit, with
        any other rows. For int8 and blocks, x is first rounded to integers of `activations` bits with
        one scale per 32 inputs (cpu/integers.h).
        """
        x_RI = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        shape = jax.ShapeDtypeStruct((len(x_RI), self.outputs), jnp.float32)
        call: Any = jax.ffi.ffi_call("medusa_product", shape)
        number, bits = np.int64(FORMS[self.form]), np.int64(self.activations)
        y_RO = call(x_RI, self.panels, floats(self.scales), form=number, activations=bits)
        return y_RO.reshape(*x.shape[:-1], self.outputs)

    def rows(self, tokens: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((tokens.size, self.inputs), jnp.float32)
        call: Any = jax.ffi.ffi_call("medusa_rows", shape)
        number, outputs = np.int64(FORMS[self.form]), np.int64(self.outputs)
        rows = tokens.reshape(-1).astype(jnp.int32)
        y = call(rows, self.panels, form=number, outputs=outputs)
        return y.reshape(*tokens.shape, self.inputs)


def panels(kernel_IO: Any, scales_O: Any, storage: Storage) -> Panels:
    """A kernel of floats, or of int8 with a scale for each output, in panels of `storage`: of JAX or of NumPy, as given."""
    if scales_O is None:
        words = in_panels(kernel_IO, storage.panel)
    else:
        words = in_blocks(kernel_IO)
        scales_O = scales_O.__array_namespace__().pad(scales_O, (0, -len(scales_O) % WIDE))
    inputs, outputs = kernel_IO.shape
    form, activations = kernel_IO.dtype.name, storage.activations
    return Panels(words, scales_O, form, inputs, outputs, activations)


def in_panels(kernel_IO: Any, panel: int) -> Any:
    """[inputs, outputs] -> panels of words [n, inputs / per word, panel], filled up with zeros.

    A word of 32 bits holds the weights of consecutive inputs: one float32 or two bfloat16, the first in its
    lowest bits.
    """
    outputs = kernel_IO.shape[1]
    per_word = 4 // kernel_IO.dtype.itemsize
    padding = ((0, -kernel_IO.shape[0] % per_word), (0, -outputs % panel))
    kernel = kernel_IO.__array_namespace__().pad(kernel_IO, padding)
    words = _words(kernel.reshape(-1, per_word, kernel.shape[1]).swapaxes(1, 2))
    return words.reshape(words.shape[0], -1, panel).swapaxes(0, 1)


def in_blocks(codes_IO: Any) -> Any:
    """int8 [inputs, outputs] -> panels [n, blocks, 8, WIDE] as `Codes` of cpu/blocks.h: words of code + 128
    of inputs 0, 2, 1 and 3 of four."""
    padding = ((0, -codes_IO.shape[0] % BLOCK), (0, -codes_IO.shape[1] % WIDE))
    codes = codes_IO.__array_namespace__().pad(codes_IO, padding).view(np.uint8) ^ 0x80
    codes = codes.reshape(-1, BLOCK // 4, 4, codes.shape[1] // WIDE, WIDE)
    return _words(codes[:, :, np.array([0, 2, 1, 3])].transpose(3, 0, 1, 4, 2))


def _words(x: Any) -> Any:
    """The 32 bits of the last axis as one word: [...] from [..., n]."""
    if isinstance(x, np.ndarray):
        x = np.ascontiguousarray(x)
    return x.view(np.uint32)[..., 0]


def floats(x: jax.Array | None) -> jax.Array:
    """Operands of the kernels: a vector in float32; empty for None."""
    return jnp.zeros((0,), jnp.float32) if x is None else x.astype(jnp.float32).reshape(-1)
