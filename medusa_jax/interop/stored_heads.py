"""Draft heads as they lie in a file, whoever wrote it: what they are and where each part is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.heads import Backbone, make_drafter, vocabulary
from medusa_jax.interop import tensors as tensor_files
from medusa_jax.interop.tensor import Tensors, whole
from medusa_jax.model.llama import Llama, abstract_params

# Parameter path -> (key in the file, whether it is stored transposed).
Locate = Callable[[str], tuple[str, bool]]


def _none(key: str) -> bool:
    return False


@dataclass(frozen=True)
class StoredHeads:
    """Heads that were found and described, but not read.

    Attributes:
      source: the file of the weights, for messages.
      directory: where a tree file may lie beside them.
      layout: how people call the layout.
      heads: kind and sizes.
      tensors: everything in the file.
      locate: where a parameter lies.
      ignore: keys that may be there and are not read.
      meta: what the description beside the weights says, {} if nothing.
      base: width, vocabulary and fingerprint of their backbone, as far as known.
      layers: fields of the backbone's shape that their own layers were made with, where a
        description says so.
      ids: of their draft vocabulary, None where they score all tokens.
      beside: what else belongs to them that reading the heads alone would lose; "" if nothing.
    """

    source: str
    directory: str
    layout: str
    heads: HeadsConfig
    tensors: Tensors
    locate: Locate
    ignore: Callable[[str], bool] = _none
    meta: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)
    ids: np.ndarray | None = None
    beside: str = ""

    def read(self, llama: LlamaConfig) -> dict[str, np.ndarray]:
        """All parameters on the host, by their paths, in the type that they are stored in.

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
def abstract_heads(heads: HeadsConfig, llama: LlamaConfig) -> Any:
    """Shapes of a drafter's parameters, nothing computed."""
    drafter = make_drafter(heads, llama)

    def init(params: Any) -> Any:
        backbone = Backbone(Llama(llama), params)
        return drafter.init(jax.random.key(0), vocabulary.stand_in(backbone, heads))

    return jax.eval_shape(init, abstract_params(llama))
