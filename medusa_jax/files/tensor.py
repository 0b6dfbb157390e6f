"""Lazily read tensors, the common form of all checkpoint files."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jax.typing import DTypeLike

from medusa_jax.errors import UserError
from medusa_jax.model.blocks import Blocks

Index = tuple[slice, ...]
# The bits of the exponent, all set in infinities and NaN, so that a pass over integers finds them.
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00}


@dataclass(frozen=True)
class Tensor:
    """A stored tensor. `read` takes a slice with step 1 per dimension and reads only that part.

    Attributes:
      blocks: the tensor's blocks in a GGUF file, a row each; None for other files.
      name: its key in the file, for messages.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Index], np.ndarray]
    blocks: Blocks | None = None
    name: str = ""


Tensors = dict[str, Tensor]


def rename(tensors: Tensors, new_key: Callable[[str], str]) -> Tensors:
    """Tensors by their renamed keys; unchanged if two would have the same."""
    result = {new_key(key): tensor for key, tensor in tensors.items()}
    return result if len(result) == len(tensors) else tensors


def read_whole(tensor: Tensor) -> np.ndarray:
    """Read a whole tensor; raises like `part`."""
    return part(tensor, tuple(slice(0, n) for n in tensor.shape))


def part(tensor: Tensor, index: Index) -> np.ndarray:
    """Read a part of a tensor.

    Raises:
      UserError: it has values that are not finite, which no model has.
    """
    values = tensor.read(index)
    if not finite(values):
        raise UserError(
            f"{tensor.file} is damaged: tensor {tensor.name!r} contains NaN or infinity"
        )
    return values


def take_rows(tensor: Tensor, rows: np.ndarray) -> Tensor:
    """Some rows of a matrix or values of a vector, in another order; a tensor with too few rows stays as it is."""
    if rows.max() >= tensor.shape[0]:
        return tensor

    def read(index: Index) -> np.ndarray:
        chosen = rows[index[0]]
        first, last = int(chosen.min()), int(chosen.max())
        return tensor.read((slice(first, last + 1), *index[1:]))[chosen - first]

    blocks = tensor.blocks and tensor.blocks.take(rows)
    shape = (len(rows), *tensor.shape[1:])
    return replace(tensor, shape=shape, read=read, blocks=blocks)


@dataclass(frozen=True)
class ByRow:
    """A stored tensor as an array to take single values from; reads only the rows that have them.

    Attributes:
      transposed: whether the array is the tensor's transpose.
    """

    tensor: Tensor
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[::-1] if self.transposed else self.tensor.shape

    def __getitem__(self, places: tuple[np.ndarray, ...]) -> np.ndarray:
        """Values by their indices in the array, one index array for each axis."""
        if len(places) == 1:
            return read_whole(self.tensor)[places]
        rows, columns = places[::-1] if self.transposed else places
        row_ids, where = np.unique(rows, return_inverse=True)
        return read_rows(self.tensor, row_ids)[where, columns]


def read_rows(matrix: Tensor, rows: np.ndarray) -> np.ndarray:
    """Some rows of a matrix, one by one: [rows, columns]."""
    if matrix.blocks is not None:
        return matrix.blocks.unpacked(rows)
    columns = slice(0, matrix.shape[1])
    return np.concatenate([part(matrix, (slice(r, r + 1), columns)) for r in rows.tolist()])


def finite(array: np.ndarray) -> bool:
    """Whether no value is an infinity or NaN."""
    if (mask := _EXPONENTS.get(array.dtype.name)) is None:
        return bool(np.isfinite(array).all())
    return not (array.view(np.uint16) & np.uint16(mask) == mask).any()


def cast(array: np.ndarray, dtype: DTypeLike, what: str) -> np.ndarray:
    """Values in another type, contiguous.

    Raises:
      UserError: it cannot hold some of them, or they are not finite; the message begins with `what`.
    """
    with np.errstate(over="ignore"):
        out = np.ascontiguousarray(array, dtype)
    if not finite(out):
        raise UserError(f"{what} has values that {out.dtype.name} cannot hold")
    return out
