"""Kernels of heads as int8, for files of half the size of bfloat16.

A kernel [in, out] is stored under two keys: `<name>/codes` int8 [in, out] and `<name>/scales` float32 [1, out],
kernel = codes / 127 x scales, as in `model/quantise.py`. Drafts may differ slightly from those of the trained
heads; the verified text does not.
"""

import ml_dtypes
import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.interop.tensor import Index, Tensor, Tensors

CODES, SCALES = "/codes", "/scales"


def encode(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert two-dimensional kernels to codes and scales, the rest (norms, biases) to bfloat16.

    Example: {"lin/kernel": [[1.0, -4], [-2, 1]]} -> "lin/kernel/scales" [[2, 4]] and
    "lin/kernel/codes" [[64, -127], [-127, 32]].
    """
    out: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if array.ndim != 2 or not name.endswith("/kernel"):
            out[name] = array.astype(ml_dtypes.bfloat16)
            continue
        wide = array.astype(np.float32)
        scales = np.maximum(np.abs(wide).max(axis=0, keepdims=True), np.float32(1e-30))
        out[name + CODES] = np.rint(wide / scales * 127).astype(np.int8)
        out[name + SCALES] = scales
    return out


def decode(tensors: Tensors, file: str) -> Tensors:
    """Replace pairs of codes and scales by lazily dequantised float32 tensors.

    Raises:
      UserError: codes without scales or vice versa, or of the wrong type or shape.
    """
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(CODES):
            base = name.removesuffix(CODES)
            out[base] = _joined(file, base, tensor, tensors.get(base + SCALES))
        elif not name.endswith(SCALES):
            out[name] = tensor
        elif name.removesuffix(SCALES) + CODES not in tensors:
            raise UserError(f"key {name!r} in {file} has no codes")
    return out


def _joined(file: str, name: str, codes: Tensor, scales: Tensor | None) -> Tensor:
    if scales is None:
        raise UserError(f"key {name + CODES!r} in {file} has no scales")
    if (
        codes.dtype != "int8"
        or scales.dtype != "float32"
        or len(codes.shape) != 2
        or scales.shape != (1, codes.shape[1])
    ):
        raise UserError(
            f"{name} in {file}: codes are int8 [in, out] and scales float32 [1, out], not "
            f"{codes.dtype} {list(codes.shape)} and {scales.dtype} {list(scales.shape)}"
        )

    def read(index: Index) -> np.ndarray:
        rows, columns = index
        unit = codes.read((rows, columns)).astype(np.float32) / 127
        return unit * scales.read((slice(0, 1), columns))

    return Tensor(codes.file, codes.shape, "float32", read, name=name)
