"""A stored tensor by its name, not yet read: what every kind of checkpoint file is opened to."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from medusa_jax.model.block_rows import Blocks

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Tensor:
    """One stored tensor. `read` takes one step-1 slice per dimension, reads only that part.

    Attributes:
      blocks: what a GGUF file holds of it, a row for each of its own; None for other files.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Index], np.ndarray]
    blocks: Blocks | None = None


Tensors = dict[str, Tensor]


def whole(tensor: Tensor) -> np.ndarray:
    """All of a tensor."""
    return tensor.read(tuple(slice(0, n) for n in tensor.shape))
