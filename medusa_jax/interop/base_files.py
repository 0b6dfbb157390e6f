"""The files of a backbone; converting heads reads only a few of its tensors."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.interop import hf
from medusa_jax.interop import tensors as tensor_files
from medusa_jax.interop.fingerprint import Fingerprint, sampled
from medusa_jax.interop.hub import resolve
from medusa_jax.interop.tensor import Tensors, whole
from medusa_jax.model.placing import abstract_params


@dataclass(frozen=True)
class BaseFiles:
    """An open model directory; weights are read on demand."""

    directory: str
    config: LlamaConfig
    tensors: Tensors

    @classmethod
    def open(cls, path_or_id: str) -> "BaseFiles":
        """Open a directory or hub id.

        Raises:
          UserError: as for `hf.load_backbone`.
        """
        directory = resolve(path_or_id)
        return cls(directory, *hf.open_model(directory))

    def array(self, path: str) -> np.ndarray:
        """The parameter at a path of the tree, in its orientation and the stored type.

        Raises:
          UserError: it is missing, or its shape contradicts config.json.
        """
        wanted = {path: self._shapes[path]}
        name, transposed = tensor_files.check_keys(
            wanted, self.tensors, hf.locate, self.directory, lambda key: True
        )[path]
        array = whole(self.tensors[name])
        return array.T if transposed else array

    def lm_head(self) -> np.ndarray:
        """The LM head's kernel [D, V]; a tied one is the embedding's transpose."""
        if self.config.tie_embeddings:
            return self.array("embed_tokens/embedding").T
        return self.array("lm_head/kernel")

    def fingerprint(self) -> str:
        """`fingerprint.py` of the loaded model."""
        result = Fingerprint()
        read = sampled(self.config)
        for path, shape in self._shapes.items():
            leaf = self.array(path) if path in read else shape
            result.update(self.config, {path: leaf})
        return result.hexdigest(self.config)

    @cached_property
    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return tensor_files.flatten(abstract_params(self.config))


def fingerprint_as_read(
    path_or_id: str, seen: Fingerprint, config: LlamaConfig, dtype: DTypeLike
) -> str:
    """The fingerprint of a backbone that was read in `dtype`.

    float16 rounds differently from the fingerprint, so it is computed from the files then.

    Args:
      path_or_id: the backbone's files, "" for a random one.
      seen: updated while the backbone was read.
    """
    if path_or_id and jnp.dtype(dtype) == jnp.float16:
        base = BaseFiles.open(path_or_id)
        if base.config == config:  # no layers were added
            return base.fingerprint()
    return seen.hexdigest(config)
