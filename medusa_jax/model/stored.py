"""The forms in which kernels are stored for decoding, and the product with each.

A decoding step waits for the weights, so kernels are stored small and read sequentially. The forms:

    an array [inputs, outputs]   as trained; the product is XLA's
    Codes                        int8 [inputs, outputs]
    Panels (`cpu/panels.py`)     on one CPU device: in the type of the model, in bfloat16, or, multiplied by
                                 activations of 16 or 8 bits, in int8 or the blocks of a GGUF file

int8 has one scale for each output. `model/quantise.py` has the forms of frozen kernels in training.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from medusa_jax.arch import STORED

# x [..., in], kernel [in, ...] -> x times the kernel, summed in float32 or wider (`Kernels.product`).
Product = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Storage:
    """How kernels are stored.

    Attributes:
      panel: outputs per panel of `Panels`; 0: plain [inputs, outputs].
      weights: the type; "" is the model's, "stored" keeps the blocks of a GGUF file
        (`model/blocks.py`).
      draft_weights: the type of draft heads; "": `of_drafts` and `of_deciding_drafts` choose.
      activations: bits of the activations that panels of int8 and blocks are multiplied by, 16 or 8.
    """

    panel: int = 0
    weights: str = ""
    draft_weights: str = ""
    activations: int = 16

    @property
    def of_drafts(self) -> "Storage":
        """The form of draft heads: int8 in panels, which take a quarter of the time to read.

        The backbone verifies all drafts, so rounding the heads changes no text. Without panels
        int8 is converted to float first, which takes longer than reading float.
        """
        narrow = "int8" if self.panel else self.weights
        return replace(self, weights=self.draft_weights or narrow, draft_weights="")

    @property
    def of_deciding_drafts(self) -> "Storage":
        """The form of draft heads under a rule whose text depends on the drafts (`Rule.by_drafts`):
        as wide as the backbone's weights."""
        return replace(self, weights=self.draft_weights or self.converted, draft_weights="")

    @property
    def converted(self) -> str:
        """The type of kernels that do not come in blocks."""
        return "" if self.weights == STORED else self.weights

    @property
    def multiplied_by(self) -> int | None:
        """Bits of the activations in products with the backbone's kernels; None: they are floats."""
        return self.activations if self.panel and self.weights in (STORED, "int8") else None


class Stored(struct.PyTreeNode):
    """A kernel [inputs, outputs] that is not a plain array; `cpu/panels.py` has another subclass."""

    @property
    def types(self) -> dict[str, int]:
        """Weights by the type they are stored in, such as {"int8": 4096}."""
        raise NotImplementedError

    def product(self, x: jax.Array, product: Product) -> jax.Array:
        """x [..., inputs] times the kernel, summed in float32 or wider.

        Args:
          product: multiplies by a plain array.
        """
        raise NotImplementedError

    def rows(self, tokens: jax.Array) -> jax.Array:
        """Rows [..., inputs] of an embedding, whose tokens are the outputs."""
        raise NotImplementedError


class Codes(Stored):
    """An int8 kernel [inputs, outputs] with a scale [outputs] for each output."""

    codes: jax.Array
    scales: jax.Array

    @property
    def types(self) -> dict[str, int]:
        return {"int8": self.codes.size}

    def product(self, x: jax.Array, product: Product) -> jax.Array:
        # Codes are exact in 16 bits, so the scales can wait for the float32 sums.
        y = product(x, self.codes.astype(x.dtype))
        return y * jnp.broadcast_to(self.scales, y.shape)


# A kernel in any form.
Kernel = jax.Array | Stored


def int8_codes(kernel: Any) -> tuple[Any, Any]:
    """A kernel [in, out] -> codes int8 [in, out] and scales [1, out]: code / 127 x scale; of JAX or of NumPy, as given."""
    wide = kernel.astype(jnp.float32)
    scales = abs(wide).max(axis=0, keepdims=True).clip(1e-30)
    codes = (wide / scales * 127).round()
    return codes.astype(jnp.int8), scales
