"""Draft heads between two layouts: a file's heads before they are read, and on their way to another engine."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import jax
import numpy as np

from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import vocabulary
from medusa_jax.heads.drafter import Backbone
from medusa_jax.heads.registry import make_drafter
from medusa_jax.interop import tensors as tensor_files
from medusa_jax.interop.base_files import BaseFiles
from medusa_jax.interop.tensor import Tensors, cast, whole
from medusa_jax.interop.torch_writer import save_torch
from medusa_jax.model.llama import Llama, abstract_params
from medusa_jax.sharding import PyTree
from medusa_jax.whole_files import Json

# Parameter path -> (key in the file, whether it is stored transposed).
Locate = Callable[[str], tuple[str, bool]]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class StoredHeads:
    """Draft heads that are described but not read yet.

    Attributes:
      source: the file of the weights, for messages.
      directory: their directory, which may have a tree file.
      layout: the name of the layout.
      heads: kind and sizes.
      tensors: everything in the file.
      locate: parameter path -> key.
      ignore: keys that may exist and are not read.
      meta: contents of the description next to the weights, {} if none.
      base: width, vocabulary and fingerprint of their backbone, as far as known.
      layers: fields of the backbone's shape that decoder layers of the heads depend on, if described.
      ids: token ids of the draft vocabulary; None if the heads score all tokens.
      needs: other weights that the heads were trained with and that are not read; "" if none.
    """

    source: str
    directory: str
    layout: str
    heads: HeadsConfig
    tensors: Tensors
    locate: Locate
    ignore: Callable[[str], bool] = lambda key: False
    meta: Json = field(default_factory=dict)
    base: Json = field(default_factory=dict)
    layers: Json = field(default_factory=dict)
    ids: np.ndarray | None = None
    needs: str = ""

    def read(self, llama: LlamaConfig) -> Arrays:
        """Read all parameters to the host by path, in their stored type.

        Raises:
          UserError: a missing, unknown, misshaped or non-float key.
        """
        keys = tensor_files.check_keys(
            abstract_heads(self.heads, llama),
            self.tensors,
            self.locate,
            self.source,
            self.ignore,
        )
        arrays = {}
        for path, (key, transposed) in keys.items():
            array = whole(self.tensors[key])
            arrays[path] = array.T if transposed else array
        return arrays


@lru_cache(maxsize=16)
def abstract_heads(heads: HeadsConfig, llama: LlamaConfig) -> PyTree:
    """Shapes of a drafter's parameters."""
    drafter = make_drafter(heads, llama)

    def init(params: PyTree) -> PyTree:
        backbone = Backbone(Llama(llama), params)
        return drafter.init(jax.random.key(0), vocabulary.stand_in(backbone, heads))

    return jax.eval_shape(init, abstract_params(llama))


@dataclass(frozen=True)
class Export:
    """Heads to write in another layout.

    Attributes:
      stored: the heads, not read yet.
      base: their backbone.
      base_name: what the files call it: a hub id or a path.
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

    def arrays(self, locate: Locate) -> Arrays:
        """All parameters by their keys in a layout, transposed where that layout is."""
        out = {}
        for path, array in self.params.items():
            key, transposed = locate(path)
            out[key] = array.T if transposed else array
        return out

    def lm_head(self, k: int) -> np.ndarray:
        """The LM head of head k [D, V]: its own, the product of its factors, or the backbone's."""
        name, kind = f"heads_{k}/lm_head", self.stored.heads.lm_head
        if kind == "own":
            return self.params[f"{name}/kernel"]
        if kind == "shared":
            return self.base.lm_head().astype(self.kind)
        down, up = (
            self.params[f"{name}/{part}"].astype(np.float32) for part in ("down", "up")
        )
        return (down @ up).astype(self.kind)

    def embedding(self) -> np.ndarray:
        """The backbone's embedding [V, D], a copy of which some layouts contain."""
        return self.base.array("embed_tokens/embedding").astype(self.kind)

    def write(self, out: str, name: str, arrays: Arrays, config: Json) -> None:
        """Write a file of weights (safetensors or torch's, by its suffix) and its config.json."""
        path = os.path.join(made_directory(out), name)
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


def made_directory(path: str) -> str:
    """Create a directory if it does not exist; returns its path.

    Raises:
      UserError: it cannot be created.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be created: {error.strerror}") from error
    return path
