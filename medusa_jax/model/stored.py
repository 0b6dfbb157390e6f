"""The forms in which kernels are stored for decoding, and the product with each.

A decoding step is bound by reading the weights, so what counts is how many bytes they are and
whether they are read in one go:

    an array [inputs, outputs]   as trained; the product is XLA's
    Panels                       as the kernels of `native` read them, on one CPU device: in the
                                 type of the model, in bfloat16, in int8, or in the blocks of a
                                 GGUF file, which give the bits that float32 would
    Codes                        int8 [inputs, outputs], where there are no panels

int8 has one scale for each output, as in `model/quantise.py`.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from medusa_jax.config import STORED
from medusa_jax.model.product import product
from medusa_jax.model.quantise import quantise
from medusa_jax.native import Parts, in_panels, panel_product, panel_scales

Params = dict[str, Any]

# The names of what multiplies: kernels, and the factors of low-rank LM heads.
KERNELS = ("kernel", "down", "up")


@dataclass(frozen=True)
class Storage:
    """How kernels are stored.

    Attributes:
      panel: outputs of a panel of `Panels`; 0: [inputs, outputs].
      weights: their type; "" is that of the model, "stored" the blocks of its file
        (`model/block_rows.py`), for kernels that come in blocks.
      draft_weights: that of draft heads; "" is what `of_drafts` and `of_deciding_drafts` say.
    """

    panel: int = 0
    weights: str = ""
    # Measurements are kept under what this has for a form, and under `of_drafts`, which tells it.
    draft_weights: str = field(default="", repr=False)

    @property
    def of_drafts(self) -> "Storage":
        """That of draft heads: int8 in panels, where it is read in a quarter of the time.

        What is drafted is checked by the backbone, so its rounding changes no text. Without panels
        int8 is made float first, which takes longer than reading it wide.
        """
        return Storage(
            self.panel, self.draft_weights or ("int8" if self.panel else self.weights)
        )

    @property
    def of_deciding_drafts(self) -> "Storage":
        """That of draft heads under a rule whose text depends on what they say (`Rule.by_drafts`):
        their rounding would change it, so they are as wide as the backbone's weights."""
        return Storage(self.panel, self.draft_weights or self.converted)

    @property
    def converted(self) -> str:
        """The type that kernels of another origin than a file's blocks are stored in."""
        return "" if self.weights == STORED else self.weights


class Panels(struct.PyTreeNode):
    """A kernel in panels of words, and for int8 its scales [n * panel].

    Attributes:
      parts: how outputs are stored and how many of them so, in their order.
      inputs: weights of an output.
    """

    panels: jax.Array
    scales: jax.Array | None
    parts: Parts = struct.field(pytree_node=False)
    inputs: int = struct.field(pytree_node=False)

    @property
    def outputs(self) -> int:
        return sum(n for _, n in self.parts)


class Codes(struct.PyTreeNode):
    """An int8 kernel [inputs, outputs] with a scale [outputs] for each output."""

    codes: jax.Array
    scales: jax.Array


# A kernel in any form.
Kernel = jax.Array | Panels | Codes


def multiply(x: jax.Array, kernel: Kernel, dtype: DTypeLike) -> jax.Array:
    """x [..., inputs] times a kernel in any form, computed in `dtype`, float32 or wider sums."""
    if isinstance(kernel, Panels):
        k = kernel
        return panel_product(x.astype(dtype), k.panels, k.parts, k.scales)
    if isinstance(kernel, Codes):
        # Codes are exact in 16 bits, so that the scales may wait for the float32 sums.
        y = product(x, kernel.codes.astype(dtype))
        return y * jnp.broadcast_to(kernel.scales, y.shape)
    return product(x, kernel.astype(dtype))


def store(params: Any, storage: Storage) -> Any:
    """The same tree with its kernels in the form of `storage`; all else stays as it is."""
    if not isinstance(params, dict):
        return params
    return {
        name: _stored(value, storage)
        if name in KERNELS and hasattr(value, "ndim")
        else store(value, storage)
        for name, value in params.items()
    }


def _stored(kernel: jax.Array, storage: Storage) -> Any:
    flat = kernel.reshape(kernel.shape[0], -1)  # a fused kernel [inputs, 1, outputs], too
    scales = None
    if storage.converted == "int8":
        coded = quantise(flat, "int8")
        flat, scales = coded["codes"], coded["scales"][0] / 127
    elif storage.converted:
        flat = flat.astype(storage.converted)
    if storage.panel:
        if scales is not None:
            scales = panel_scales(scales, storage.panel)
        words = in_panels(flat, storage.panel)
        parts = ((flat.dtype.name, kernel[0].size),)
        return Panels(words, scales, parts, kernel.shape[0])
    if scales is not None:
        return Codes(flat, scales)
    return flat.reshape(kernel.shape)
