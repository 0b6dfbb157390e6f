"""Read Hugging Face model directories; `hf_config.py` reads config.json, `hf_writer.py` writes both."""

import hashlib
import os
import re
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files.families import VISION
from medusa_jax.files.fingerprint import fingerprint, sample_bytes
from medusa_jax.files.hf_config import family_of, read_config
from medusa_jax.files.hf_keys import (
    EMBEDDING,
    HARMLESS,
    HEADS,
    LANGUAGE_MODEL,
    LAYER,
    LM_HEAD,
    NOT_OF_TEXT,
    WRAPPER,
    locate,
)
from medusa_jax.files.hub import resolve
from medusa_jax.files.json_files import read_json
from medusa_jax.files.source import Convert, Source, flatten
from medusa_jax.files.stored_forms import as_llama
from medusa_jax.files.tensor import ByRow, Tensor, Tensors, read_rows, take_rows
from medusa_jax.files.tensors import open_checkpoint, weights_files
from medusa_jax.model.convert import abstract_params
from medusa_jax.sharding import Params


@dataclass(frozen=True, kw_only=True)
class BaseFiles(Source):
    """An open model directory; weights are read on demand."""

    config: LlamaConfig

    @classmethod
    def open(cls, path: str) -> "BaseFiles":
        """Open a model directory or hub id: its shape as the weights have it.

        As in transformers 5, keys may lack `model.`. If config.json ties the LM head to the embedding, the weights
        decide: two that differ are not tied, one alone serves as both.

        Raises:
          UserError: unreadable, the keys of a wrapped model, or a key with and without the prefix.
        """
        directory = resolve(path)
        config, tensors = read_config(directory), open_checkpoint(directory)
        raw = read_json(file := os.path.join(directory, "config.json"))
        if raw["model_type"] in VISION:
            of_text = {k: x for k, x in tensors.items() if not NOT_OF_TEXT.match(k)}
            tensors = {LANGUAGE_MODEL.sub("", k): x for k, x in of_text.items()}
        _refuse_wrapped(directory, tensors)
        tensors = as_llama(tensors, family_of(file, raw), config)
        flat = [name for name in tensors if re.match(r"(layers|embed_tokens|norm)\.", name)]
        for name in flat:
            if f"model.{name}" in tensors:
                raise UserError(
                    f"{directory}: key {name!r} is also there as 'model.{name}'"
                )
            tensors[f"model.{name}"] = tensors.pop(name)
        if config.tie_embeddings and LM_HEAD in tensors:
            if EMBEDDING not in tensors:
                tensors[EMBEDDING] = tensors[LM_HEAD]
            elif not _are_equal(tensors[EMBEDDING], tensors[LM_HEAD]):
                inform(
                    f"{directory}: tied by config.json, but the LM head differs from the embedding: not tied"
                )
                config = replace(config, tie_embeddings=False)

        def ignore(name: str) -> bool:
            copy_of_embedding = config.tie_embeddings and name == LM_HEAD
            return (
                copy_of_embedding or name.startswith(HEADS) or bool(HARMLESS.search(name))
            )

        return cls(
            source=directory, tensors=tensors, locate=locate, ignore=ignore, config=config
        )

    def parameters(
        self,
        mesh: Mesh,
        dtype: DTypeLike = "float32",
        convert: Convert | None = None,
        in_blocks: bool = False,
    ) -> Params:
        """All parameters, placed on the mesh.

        Kernels are transposed to [in, out]; every device reads only its slices.

        Args:
          dtype: type of the parameters; tensors of another type are cast on the host.
          convert: converts each entry of the tree, such as a layer, before the next is read, so that two forms of
            the whole model never coexist.
          in_blocks: `convert` gets matrices of a GGUF file as `Blocks`.

        Raises:
          UserError: unreadable, or keys that contradict the configuration (checked before anything is read).
        """
        return self.load(abstract_params(self.config), mesh, dtype, convert, in_blocks)

    def array(self, path: str) -> np.ndarray:
        """The parameter at a path of the tree, in its orientation and the stored type.

        Raises:
          UserError: it is missing, or its shape contradicts config.json.
        """
        one, shapes = replace(self, ignore=lambda key: True), abstract_params(self.config)
        return one.arrays({path: flatten(shapes)[path]})[path]

    def lm_head(self) -> np.ndarray:
        """The LM head's kernel [D, V]; a tied one is the embedding's transpose."""
        if self.config.tie_embeddings:
            return self.array("embed_tokens/embedding").T
        return self.array("lm_head/kernel")

    def lm_head_columns(self, ids_O: np.ndarray) -> np.ndarray:
        """Columns [D, O] of the LM head's kernel, for these tokens."""
        return read_rows(self.tensors[self._lm_head_key], ids_O).T

    def has_lm_head(self, copy: Tensor, ids_O: np.ndarray | None = None) -> bool:
        """Whether a stored matrix [O, D] is the LM head for these tokens, perhaps divided as the logits are."""
        divisor = self.config.logit_divisor
        head = self.tensors[self._lm_head_key]
        head = head if ids_O is None else take_rows(head, ids_O)
        return any(_are_equal(head, copy, by) for by in {1.0, divisor})

    def has_embedding(self, copy: Tensor) -> bool:
        """Whether a stored matrix [V, D] is the embedding times its factor, but for rounding to few bits; by a sample."""
        table = self.tensors[self.locate("embed_tokens/embedding")[0]]
        if copy.shape != table.shape:
            return False
        rows = np.linspace(0, copy.shape[0] - 1, 256).astype(int)
        ours, theirs = (read_rows(x, rows).astype(np.float32) for x in (table, copy))
        ours *= self.config.embedding_multiplier
        return bool(np.linalg.norm(theirs - ours) < 0.5 * np.linalg.norm(ours))

    @property
    def _lm_head_key(self) -> str:
        entry = "embed_tokens/embedding" if self.config.tie_embeddings else "lm_head/kernel"
        return self.locate(entry)[0]

    def by_row(self) -> dict[str, ByRow]:
        """All parameters by path, to take single values from."""
        keys = self.keys(abstract_params(self.config)).items()
        return {path: ByRow(self.tensors[key], turned) for path, (key, turned) in keys}

    def fingerprint(self) -> str:
        """The `fingerprint` of the model, from a sample of the weights in its files."""
        return fingerprint(self.config, self.by_row())

    def norm_digest(self) -> str:
        """Digest of the final norm's scale, 16 hex digits: quantisation leaves it as it is, but for its type."""
        scale_D = self.array("norm/scale")
        return hashlib.sha256(sample_bytes(scale_D, scale_D.size)).hexdigest()[:16]


def _refuse_wrapped(directory: str, tensors: Tensors) -> None:
    """Refuse the keys of a model inside another module."""
    added = {m[0] for name in tensors if (m := WRAPPER.search(name))}
    prefixes = {m[1] for name in tensors if (m := LAYER.match(name))}
    if added or (prefixes and "" not in prefixes):
        raise UserError(
            f"{directory}: keys have the prefix {min(added or prefixes)!r}, which is not the model's: "
            "save the model without its wrapper, or rename the keys"
        )


def _are_equal(a: Tensor, b: Tensor, divisor: float = 1.0) -> bool:
    """Whether matrices a / divisor, rounded to b's type, and b are equal; both are read 1024 rows at a time."""
    if a.shape != b.shape or len(a.shape) != 2:
        return False
    V, D = a.shape
    parts = [(slice(i, min(i + 1024, V)), slice(0, D)) for i in range(0, V, 1024)]
    for part in parts:
        x, y = a.read(part), b.read(part)
        if divisor != 1:
            x = x.astype(np.float32) / divisor
        if not np.array_equal(x.astype(y.dtype, copy=False), y):
            return False
    return True


def model_shape(directory: str) -> LlamaConfig:
    """The shape of a local model, which may have no weights."""
    config = read_config(directory)
    has_weights = config.tie_embeddings and weights_files(directory)
    return BaseFiles.open(directory).config if has_weights else config


def load_backbone(
    path: str, mesh: Mesh, dtype: DTypeLike = "float32"
) -> tuple[LlamaConfig, Params]:
    """Configuration and parameters of a model directory or hub id; as `BaseFiles.parameters`."""
    base = BaseFiles.open(path)
    return base.config, base.parameters(mesh, dtype)
