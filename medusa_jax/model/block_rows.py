"""Kernels in the blocks of a GGUF file: what reading gives of them, and as decoding reads them."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.model.stored import Panels
from medusa_jax.native import in_panels, library, pack_blocks, packs


@dataclass(frozen=True)
class Blocks:
    """Rows of a tensor as they are stored.

    Attributes:
      kind: type of the blocks, such as "Q4_1".
      rows: reads all of them: [rows, bytes], uint8.
      unpacked: reads some, by a slice or an array of their numbers, in float32.
      damaged: what is raised where a scale is no number.
    """

    kind: str
    rows: Callable[[], np.ndarray]
    unpacked: Callable[[Any], np.ndarray]
    damaged: Exception


@dataclass(frozen=True)
class BlockRows:
    """A kernel, or an embedding, as it is stored in a file; a row has all weights of an output (a token).

    Attributes:
      shape: that of the parameter it is: kernels [inputs, outputs], embeddings [tokens, width].
      by_column: whether outputs are the parameter's columns, as a kernel's are.
      blocks: what the file has of it.
    """

    shape: tuple[int, ...]
    by_column: bool
    blocks: Blocks

    @property
    def outputs(self) -> int:
        return self.shape[1] if self.by_column else self.shape[0]

    @property
    def inputs(self) -> int:
        return self.shape[0] if self.by_column else self.shape[1]

    @property
    def packs(self) -> bool:
        """Whether its blocks have panels; they have none of other types, or without a compiler."""
        return packs(self.blocks.kind, self.inputs)

    def __getitem__(self, places: tuple[np.ndarray, ...]) -> np.ndarray:
        """Single weights, by the parameter's indices."""
        inputs, outputs = places if self.by_column else places[::-1]
        needed, where = np.unique(outputs, return_inverse=True)
        return self.blocks.unpacked(needed)[where, inputs]


def packed(kernels: Sequence[BlockRows]) -> Panels:
    """Kernels of the same inputs side by side, in their blocks; other types in float32.

    Raises: what `damaged` says.
    """
    words, parts = [], []
    for kind, group in itertools.groupby(kernels, lambda k: k.blocks.kind):
        alike = list(group)
        inputs, form = alike[0].inputs, kind
        if alike[0].packs:
            found = pack_blocks(kind, _stacked([k.blocks.rows() for k in alike]), inputs)
            if found is None:
                raise alike[0].blocks.damaged
        else:
            native, form = library(), "float32"
            assert native is not None
            rows = _stacked([k.blocks.unpacked(slice(None)) for k in alike])
            found = np.asarray(in_panels(jnp.asarray(rows.T), native.panel)).ravel()
        words.append(found)
        parts.append((form, sum(k.outputs for k in alike)))
    words_on_device = jax.device_put(_stacked(words))
    return Panels(words_on_device, None, tuple(parts), kernels[0].inputs)


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def in_blocks(tree: Any) -> dict[str, Any]:
    """The entries of a parameter tree that are `BlockRows`, as a tree of the same shape."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, BlockRows):
            found[name] = value
        elif isinstance(value, dict) and (inner := in_blocks(value)):
            found[name] = inner
    return found


def without_blocks(tree: Any) -> dict[str, Any]:
    """A parameter tree without its `BlockRows`; what held nothing else is empty."""
    return {
        name: without_blocks(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if not isinstance(value, BlockRows)
    }
