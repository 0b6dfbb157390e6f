"""The files of a backbone, of which converting heads needs a few tensors and never the whole."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.config import LlamaConfig
from medusa_jax.interop import hf
from medusa_jax.interop import tensors as tensor_files
from medusa_jax.interop.fingerprint import Fingerprint, sampled
from medusa_jax.interop.hub import resolve
from medusa_jax.interop.tensor import Tensors, whole


@dataclass(frozen=True)
class BaseFiles:
    """A model directory, opened; weights are read when asked for."""

    directory: str
    config: LlamaConfig
    tensors: Tensors

    @classmethod
    def open(cls, path_or_id: str) -> "BaseFiles":
        """Of a directory or a hub id.

        Raises:
          UserError: as for `hf.load_backbone`.
        """
        directory = resolve(path_or_id)
        tensors = tensor_files.open_checkpoint(directory)
        return cls(directory, hf.read_config(directory), tensors)

    def array(self, path: str) -> np.ndarray:
        """The parameter at a path of our tree, in our orientation and the stored type.

        Raises:
          UserError: it is missing or has another shape than config.json says.
        """
        wanted = {path: self._shapes[path]}
        name, transposed = tensor_files.check_keys(
            wanted, self.tensors, hf.locate, self.directory, lambda key: True
        )[path]
        array = whole(self.tensors[name])
        return array.T if transposed else array

    def lm_head(self) -> np.ndarray:
        """The LM head's kernel [D, V]; where it is tied, the embedding's transpose."""
        if self.config.tie_embeddings:
            return self.array("embed_tokens/embedding").T
        return self.array("lm_head/kernel")

    def fingerprint(self) -> str:
        """What `hf.fingerprint` gives for the model once it is loaded."""
        marks = Fingerprint()
        read_whole = sampled(self.config)
        for path, shape in self._shapes.items():
            read = self.array(path) if path in read_whole else shape
            marks.see(self.config, {path: read})
        return marks.digits(self.config)

    @cached_property
    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return tensor_files.flatten(hf.abstract_params(self.config))


def fingerprint_as_read(
    path_or_id: str, marks: Fingerprint, config: LlamaConfig, dtype: Any
) -> str:
    """The fingerprint of a backbone that was read in some type.

    float16 rounds weights otherwise than a fingerprint does, so there it is taken from the files.

    Args:
      path_or_id: where it was read from, "" for one at random.
      marks: what was seen of it while it was read.
    """
    if path_or_id and jnp.dtype(dtype) == jnp.float16:
        base = BaseFiles.open(path_or_id)
        if base.config == config:  # no layers were added
            return base.fingerprint()
    return marks.digits(config)
