"""A layout of draft heads: how their files are recognised, read and written."""

import json
import os
import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.console import inform
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.layouts.stored_heads import Arrays, StoredHeads
from medusa_jax.files.source import Locate
from medusa_jax.files.tensor import Tensors, cast
from medusa_jax.files.tensors import save_safetensors
from medusa_jax.notation import byte_size
from medusa_jax.whole_files import Json, write_json


@dataclass(frozen=True)
class HeadFiles:
    """Files that may hold draft heads.

    Attributes:
      source: the file of weights, or the index of its shards; for messages.
      directory: the directory of that file.
      tensors: everything that it holds, without the prefixes of torch's wrappers.
      config: `config.json` next to it, {} if there is none.
    """

    source: str
    directory: str
    tensors: Tensors
    config: Json

    @property
    def config_file(self) -> str:
        return os.path.join(self.directory, "config.json")


@dataclass(frozen=True)
class Export:
    """Heads to write in another layout.

    Attributes:
      stored: the heads, not read yet.
      base: their backbone.
      base_name: its name in the files, a hub id or a path.
      dtype: type of the stored tensors; "" keeps the heads' type, the wider of several; "int8" is for this
        project's layout only.
    """

    stored: StoredHeads
    base: BaseFiles
    base_name: str
    dtype: str = ""

    @cached_property
    def params(self) -> Arrays:
        """Parameter path -> array in our orientation, all of one type."""
        arrays = self.stored.read(self.base.config)
        # Only this project's layout has int8, quantised from the heads' type (`native_heads.save_heads`).
        kind = np.dtype(self.dtype) if self.dtype not in ("", "int8") else widest(arrays)
        return {path: cast(array, kind, repr(path)) for path, array in arrays.items()}

    @property
    def kind(self) -> np.dtype:
        """The type of every tensor."""
        return next(iter(self.params.values())).dtype

    @cached_property
    def whole(self) -> Arrays:
        """`params` with a kernel [D, V] as the LM head of every head.

        It is the head's, the product of its factors, or the backbone's.
        """
        kind, factors = self.stored.heads.lm_head, ("lm_head/down", "lm_head/up")
        out = {path: x for path, x in self.params.items() if not path.endswith(factors)}
        lm_head = self.lm_head() if kind == "shared" else None
        for k in range(self.stored.heads.n_heads):
            stem = f"heads_{k}/lm_head"
            if lm_head is not None:
                out[f"{stem}/kernel"] = lm_head
            elif kind == "low_rank":
                down = self.params[f"{stem}/down"].astype(np.float32)
                up = self.params[f"{stem}/up"].astype(np.float32)
                out[f"{stem}/kernel"] = np.matmul(down, up).astype(self.kind)
        return out

    def arrays(self, locate: Locate, params: Arrays | None = None) -> Arrays:
        """Parameters, by default all, by their keys in a layout, transposed where that layout is."""
        out = {}
        for path, array in (self.params if params is None else params).items():
            key, transposed = locate(path)
            out[key] = array.T if transposed else array
        return out

    def lm_head(self, ids_O: np.ndarray | None = None) -> np.ndarray:
        """The backbone's LM head for these tokens [D, O], by default all, divided as its logits are."""
        base = self.base
        lm_head_DO = base.lm_head() if ids_O is None else base.lm_head_columns(ids_O)
        if (divisor := base.config.logit_divisor) != 1:
            lm_head_DO = lm_head_DO.astype(np.float32) / divisor
        return lm_head_DO.astype(self.kind)

    def embedding(self) -> np.ndarray:
        """The backbone's embedding [V, D], multiplied by its factor. Some layouts contain this copy."""
        multiplier = self.kind.type(self.base.config.embedding_multiplier)
        return self.base.array("embed_tokens/embedding").astype(self.kind) * multiplier

    def write(self, out: str, name: str, arrays: Arrays, config: Json) -> None:
        """Write a file of weights (safetensors or torch's, by its suffix) and its config.json, with their type."""
        path = os.path.join(out, name)
        n_bytes = sum(x.nbytes for x in arrays.values())
        inform(f"writing {name}: {byte_size(n_bytes)} in {self.kind.name}")
        if name.endswith(".safetensors"):
            save_safetensors(path, arrays, {"format": "pt"})
        else:
            from medusa_jax.files.torch_writer import save_torch  # only for such files

            save_torch(path, arrays)
        write_json(
            os.path.join(out, "config.json"), config | {"torch_dtype": self.kind.name}
        )


def widest(arrays: Arrays) -> np.dtype:
    """The type of the arrays; of several, one that holds all their values."""
    kinds = {array.dtype for array in arrays.values()}
    if len(kinds) == 1:
        return kinds.pop()
    return np.dtype(np.float64 if np.dtype(np.float64) in kinds else np.float32)


def without_factor(engine: str, llama: LlamaConfig | None) -> str:
    """The reason why heads cannot read the embedding that an engine shares with the model; "" if they can."""
    if llama is None or (factor := llama.embedding_multiplier) == 1:
        return ""
    return f"{engine} gives heads the model's embedding without its factor {factor:g}"


# `Layout.loading` for vLLM.
VLLM_COMMAND = "`vllm serve {base} --speculative-config {speculative_config}`"


class Layout:
    """A layout of draft heads.

    A subclass overrides `fits` and `open` if it can be read, `write` if it can be written. One of another package is
    found by an entry point of the group `registry.GROUP`, or `convert --to module:Class` names it.

    Attributes:
      name: its value of `--to`.
      loading: how to load the directory {out} with {heads} heads (with the root {nodes} nodes) of the kind {drafter} (or
        {DRAFTER}) for the model {base}, for the model card; {speculative_config} is vLLM's.
      drafters: the kinds of heads that it can hold, "*" for all. `registry.TARGETS` repeats them for the package's
        layouts, so that a layout can be found without importing the others.
      draft_vocab: it can store which tokens the heads score.
    """

    name: ClassVar[str]
    loading: ClassVar[str] = "as the package of this layout describes"
    drafters: ClassVar[tuple[str, ...]] = ()
    draft_vocab: ClassVar[bool] = False

    def how_to_load(self, heads: HeadsConfig, base: str, out: str) -> str:
        """`loading` for heads in a directory, its words quoted for a shell."""
        n, kind = heads.n_heads, heads.drafter
        config = {"method": kind, "model": out, "num_speculative_tokens": n}
        names = {"base": base, "out": out, "drafter": kind, "DRAFTER": kind.upper()}
        names["speculative_config"] = json.dumps(config, ensure_ascii=False)
        words = {name: shlex.quote(value) for name, value in names.items()}
        return self.loading.format(heads=n, nodes=n + 1, **words)

    def why_not(self, heads: HeadsConfig, llama: LlamaConfig | None) -> str:
        """The reason why heads of its kinds cannot be stored; "" if they can.

        Args:
          heads: their complete configuration.
          llama: the shape of their backbone; None skips the checks that depend on it.
        """
        return ""

    def fits(self, tensors: Tensors) -> bool:
        """Whether a file with these keys has this layout.

        Published configurations contradict their files, so that keys alone decide.
        """
        return False

    def open(self, files: HeadFiles) -> StoredHeads:
        """Describe the heads of files that fit; their weights are read later.

        Raises:
          UserError: missing, unknown or unsupported fields; tensors that contradict them.
        """
        raise NotImplementedError

    def write(self, export: Export, out: str) -> None:
        """Write heads into the empty directory `out`.

        Raises:
          UserError: unreadable heads, or the disk is full.
        """
        raise NotImplementedError
