"""Draft heads on their way to another layout."""

import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from medusa_jax.files import tensors as tensor_files
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.layouts.stored_heads import Arrays, StoredHeads
from medusa_jax.files.tensor import cast
from medusa_jax.files.tensors import Locate
from medusa_jax.files.torch_writer import save_torch
from medusa_jax.whole_files import Json


@dataclass(frozen=True)
class Export:
    """Heads to write in another layout.

    Attributes:
      stored: the heads, not read yet.
      base: their backbone.
      base_name: its name in the files, a hub id or a path.
      dtype: type of the stored tensors; "" keeps the heads' type, the wider of several; "int8" is for our own
        layout only.
    """

    stored: StoredHeads
    base: BaseFiles
    base_name: str
    dtype: str = ""

    @cached_property
    def params(self) -> Arrays:
        """Parameter path -> array in our orientation, all of one type."""
        arrays = self.stored.read(self.base.config)
        # Only our own layout has int8, quantised from the heads' type (`own_heads.save_heads`).
        kind = np.dtype(self.dtype) if self.dtype not in ("", "int8") else widest(arrays)
        return {path: cast(array, kind, repr(path)) for path, array in arrays.items()}

    @property
    def kind(self) -> np.dtype:
        """The type of every tensor."""
        return next(iter(self.params.values())).dtype

    @cached_property
    def whole(self) -> Arrays:
        """`params` with a kernel [D, V] as the LM head of every head.

        It is the head's own, the product of its factors, or the backbone's.
        """
        kind, factors = self.stored.heads.lm_head, ("lm_head/down", "lm_head/up")
        out = {path: x for path, x in self.params.items() if not path.endswith(factors)}
        shared = self.base.lm_head().astype(self.kind) if kind == "shared" else None
        for k in range(self.stored.heads.n_heads):
            stem = f"heads_{k}/lm_head"
            if shared is not None:
                out[f"{stem}/kernel"] = shared
            elif kind == "low_rank":
                wide = (
                    self.params[path].astype(np.float32)
                    for path in (f"{stem}/down", f"{stem}/up")
                )
                out[f"{stem}/kernel"] = np.matmul(*wide).astype(self.kind)
        return out

    def arrays(self, locate: Locate, params: Arrays | None = None) -> Arrays:
        """Parameters, by default all, by their keys in a layout, transposed where that layout is."""
        out = {}
        for path, array in (self.params if params is None else params).items():
            key, transposed = locate(path)
            out[key] = array.T if transposed else array
        return out

    def embedding(self) -> np.ndarray:
        """The backbone's embedding [V, D], a copy of which some layouts contain."""
        return self.base.array("embed_tokens/embedding").astype(self.kind)

    def write(self, out: str, name: str, arrays: Arrays, config: Json) -> None:
        """Write a file of weights (safetensors or torch's, by its suffix) and its config.json."""
        path = os.path.join(out, name)
        if name.endswith(".safetensors"):
            tensor_files.save_safetensors(path, arrays, {"format": "pt"})
        else:
            save_torch(path, arrays)
        tensor_files.save_json(os.path.join(out, "config.json"), config)


def widest(arrays: Arrays) -> np.dtype:
    """The type of the arrays; of several, one that holds all their values."""
    kinds = {array.dtype for array in arrays.values()}
    if len(kinds) == 1:
        return kinds.pop()
    return np.dtype(np.float64 if np.dtype(np.float64) in kinds else np.float32)
