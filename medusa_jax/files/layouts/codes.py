"""Kernels of heads as int8, for files of half the size of bfloat16.

A kernel [in, out] is stored under two keys: `<name>/codes` int8 [in, out] and `<name>/scales` float32 [1, out],
and is codes / 127 x scales. Drafts may differ slightly from those of the trained heads; the text does not.
"""

from functools import partial

import ml_dtypes
import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.files.tensor import Index, Tensor, Tensors
from medusa_jax.model.stored import int8_codes

CODES, SCALES = "/codes", "/scales"


def encode(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert two-dimensional kernels to codes and scales, other arrays (norms, biases) to bfloat16.

    Example: {"lin/kernel": [[1.0, -4], [-2, 1]]} -> "lin/kernel/scales" [[2, 4]] and
    "lin/kernel/codes" [[64, -127], [-127, 32]].
    """
    out: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if array.ndim != 2 or not name.endswith("/kernel"):
            out[name] = array.astype(ml_dtypes.bfloat16)
            continue
        out[name + CODES], out[name + SCALES] = int8_codes(array)
    return out


def decode(tensors: Tensors, file: str) -> Tensors:
    """Replace pairs of codes and scales by lazily dequantised float32 tensors.

    Raises:
      UserError: codes without scales or vice versa, or of the wrong type or shape.
    """
    out = {}
    for name, tensor in tensors.items():
        if not name.endswith((CODES, SCALES)):
            out[name] = tensor
            continue
        base = name.removesuffix(CODES).removesuffix(SCALES)
        codes, scales = tensors.get(base + CODES), tensors.get(base + SCALES)
        if (
            codes is None or scales is None or len(codes.shape) != 2
            or (codes.dtype, scales.dtype) != ("int8", "float32")
            or scales.shape != (1, codes.shape[1])
        ):  # fmt: skip
            raise UserError(
                f"{base} in {file} needs codes in int8 [in, out] and scales in float32 [1, out]"
            )
        read = partial(_read, codes, scales)
        out[base] = Tensor(codes.file, codes.shape, "float32", read, name=base)
    return out


def _read(codes: Tensor, scales: Tensor, index: Index) -> np.ndarray:
    rows, columns = index
    unit = codes.read((rows, columns)).astype(np.float32) / 127
    return unit * scales.read((slice(0, 1), columns))
