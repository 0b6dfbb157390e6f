"""The forms in which kernels are stored for decoding, and the product with each.

A decoding step is bound by reading the weights, so what counts is how many bytes they are and
whether they are read in one go:

    an array [inputs, outputs]   as trained; the product is XLA's
    Codes                        int8 [inputs, outputs]
    Panels (`cpu/panels.py`)     on one CPU device: in the type of the model, in bfloat16, in int8, or in
                                 the blocks of a GGUF file, which give the bits that float32 would

int8 has one scale for each output, as in `model/quantise.py`.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from medusa_jax.config import STORED
from medusa_jax.model.engine import cpu
from medusa_jax.model.product import product
from medusa_jax.model.quantise import quantise

# The names of what multiplies: kernels, and the factors of low-rank LM heads.
KERNELS = ("kernel", "down", "up")


@dataclass(frozen=True)
class Storage:
    """How kernels are stored.

    Attributes:
      panel: outputs of a panel of `Panels`; 0: [inputs, outputs].
      weights: their type; "" is that of the model, "stored" the blocks of its file
        (`model/blocks.py`), for kernels that come in blocks.
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


class Stored(struct.PyTreeNode):
    """A kernel [inputs, outputs] in another form than this array; `cpu/panels.py` has one, too."""

    @property
    def types(self) -> dict[str, int]:
        """Weights by the type they are stored in, such as {"int8": 4096}."""
        raise NotImplementedError

    def product(self, x: jax.Array) -> jax.Array:
        """x [..., inputs] times the kernel, summed in float32 or wider."""
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

    def product(self, x: jax.Array) -> jax.Array:
        # Codes are exact in 16 bits, so the scales can wait for the float32 sums.
        y = product(x, self.codes.astype(x.dtype))
        return y * jnp.broadcast_to(self.scales, y.shape)


# A kernel in any form.
Kernel = jax.Array | Stored


def multiply(x: jax.Array, kernel: Kernel, dtype: DTypeLike) -> jax.Array:
    """x [..., inputs] times a kernel in any form, computed in `dtype`, summed in float32 or wider."""
    if isinstance(kernel, Stored):
        return kernel.product(x.astype(dtype))
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
        return cpu().panels(flat, scales, storage.panel)
    if scales is not None:
        return Codes(flat, scales)
    return flat.reshape(kernel.shape)
