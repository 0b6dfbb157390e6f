"""Lazily read tensors, the common form of all checkpoint files."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from medusa_jax.model.block_rows import Blocks

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Tensor:
    """A stored tensor. `read` takes a slice with step 1 per dimension and reads only that part.

    Attributes:
      blocks: the tensor's blocks in a GGUF file, a row each; None for other files.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Index], np.ndarray]
    blocks: Blocks | None = None


Tensors = dict[str, Tensor]


def whole(tensor: Tensor) -> np.ndarray:
    """Read a whole tensor."""
    return tensor.read(tuple(slice(0, n) for n in tensor.shape))
