"""Kernels in the blocks of GGUF files, as panels of the native kernels: nothing is rounded again."""

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.native.library import library

# How weights may be stored in panels; see `enum Form` in native/blocks.h.
FORMS = {"float32": 1, "bfloat16": 2, "int8": 4} | {
    name: 16 + i
    for i, name in enumerate(
        ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
    )
}


def packs(kind: str, inputs: int) -> bool:
    """Whether rows of this many inputs in blocks of this type have panels."""
    native = library()
    return native is not None and native.packed_words(FORMS.get(kind, 0), 1, inputs) > 0


def pack_blocks(kind: str, rows: np.ndarray, inputs: int) -> np.ndarray | None:
    """Rows of blocks [outputs, bytes] as words of panels; None where a scale is no number.

    A row of blocks holds all weights of one output.
    """
    native, outputs = library(), len(rows)
    assert native is not None and rows.dtype == np.uint8
    words = np.zeros(native.packed_words(FORMS[kind], outputs, inputs), np.uint32)
    rows = np.ascontiguousarray(rows)
    call = ctypes.CDLL(native.path).medusa_pack
    longs = (ctypes.c_int64(n) for n in (rows.shape[1], outputs, inputs))
    at = [ctypes.c_void_p(a.ctypes.data) for a in (rows, words)]
    return words if call(ctypes.c_int64(FORMS[kind]), at[0], *longs, at[1]) else None


def unpacked_rows(
    rows: jax.Array, words: jax.Array, kind: str, outputs: int, inputs: int
) -> jax.Array:
    """The weights of some outputs of a kernel in blocks: rows [...] -> [..., inputs] in float32.

    An embedding is a kernel whose outputs are the tokens.
    """
    shape = jax.ShapeDtypeStruct((rows.size, inputs), jnp.float32)
    call: Any = jax.ffi.ffi_call("medusa_rows", shape)
    form, n = np.int64(FORMS[kind]), np.int64(outputs)
    y = call(rows.reshape(-1).astype(jnp.int32), words, form=form, outputs=n)
    return y.reshape(*rows.shape, inputs)
