"""Draft heads for other engines: one directory in the layout that each of them loads.

Engines fail silently where a key or a field is off (they drop what they do not know and leave
the rest random), so every layout here is read back in the tests by a strict re-implementation
of its loader. docs/formats.md lists keys, fields and known pitfalls.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.heads import make_drafter, vocabulary
from medusa_jax.interop import (
    eagle3_files,
    eagle_files,
    heads_io,
    hydra_files,
    speculators_config,
)
from medusa_jax.interop import tensors as tensor_files
from medusa_jax.interop.base_files import BaseFiles
from medusa_jax.interop.hf_config import config_to_hf
from medusa_jax.interop.stored_heads import StoredHeads
from medusa_jax.interop.tokenizer_files import copy_tokenizer
from medusa_jax.interop.torch_writer import save_torch
from medusa_jax.whole_files import Json

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Export:
    """Heads on their way out.

    Attributes:
      stored: the heads, not yet read.
      base: their backbone.
      base_name: what the files call it: a hub id or a path.
      dtype: what tensors are stored in; "" keeps the heads' own type, the wider where they mix;
        "int8" is for our own layout alone.
    """

    stored: StoredHeads
    base: BaseFiles
    base_name: str
    dtype: str = ""

    @cached_property
    def params(self) -> Arrays:
        """Parameter path -> array in our orientation, all of one type."""
        arrays = self.stored.read(self.base.config)
        # A byte a weight is a way to store them, from what they are (`to_native`).
        kind = np.dtype(self.dtype) if self.dtype not in ("", "int8") else widest(arrays)
        return {path: array.astype(kind) for path, array in arrays.items()}

    @property
    def kind(self) -> np.dtype:
        """The type of every tensor."""
        return next(iter(self.params.values())).dtype

    def medusa(self, target: str) -> None:
        """Refuse all but Medusa heads.

        Raises:
          UserError: names the target.
        """
        drafter = self.stored.heads.drafter
        if drafter != "medusa":
            raise UserError(
                f"{target} loads Medusa heads only, {self.stored.source} holds {drafter} heads: "
                "no other engine runs them (--to native keeps them in this project's format)"
            )

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

    def blocks(self, name: str) -> Arrays:
        """The residual blocks as torch's Linear stores them, under `name` with {k}, {j}, {leaf}."""
        heads, out = self.stored.heads, {}
        for k in range(heads.n_heads):
            for j in range(heads.n_layers):
                path = f"heads_{k}/layers_{j}"
                out[name.format(k=k, j=j, leaf="weight")] = self.params[f"{path}/kernel"].T
                out[name.format(k=k, j=j, leaf="bias")] = self.params[f"{path}/bias"]
        return out

    def medusa_arrays(self, prefix: str = "") -> Arrays:
        """{prefix}{k}.{j}.linear.weight, .bias and {prefix}{k}.{L}.weight."""
        heads = self.stored.heads
        out = self.blocks(f"{prefix}{{k}}.{{j}}.linear.{{leaf}}")
        for k in range(heads.n_heads):
            out[f"{prefix}{k}.{heads.n_layers}.weight"] = self.lm_head(k).T
        return out


def widest(arrays: Arrays) -> np.dtype:
    """The type of the arrays; of several, one that holds all their values."""
    kinds = {array.dtype for array in arrays.values()}
    if len(kinds) == 1:
        return kinds.pop()
    return np.dtype(np.float64 if np.dtype(np.float64) in kinds else np.float32)


def to_native(export: Export, out: str) -> None:
    """This project's own format, with the fingerprint of the backbone and the tree, if any."""
    stored = export.stored
    record = heads_io.base_record(export.base.config, export.base.fingerprint())
    recipe = stored.meta.get("recipe")
    if not isinstance(recipe, dict):
        recipe = {"converted_from": stored.layout, "config": stored.meta}
    tree = os.path.join(stored.directory, "tree.json")
    params = tensor_files.unflatten(export.params)
    if stored.ids is not None:
        params[vocabulary.GROUP] = {"ids": stored.ids}
    dtype = export.dtype or None
    heads_io.save_heads(out, stored.heads, params, base=record, recipe=recipe, dtype=dtype)
    if os.path.isfile(tree):
        shutil.copy(tree, out)


def to_tgi(export: Export, out: str) -> None:
    """What TGI reads, and vLLM from 0.28 on: `medusa_lm_head.safetensors`, LM heads of their own."""
    export.medusa("TGI")
    _save(out, "medusa_lm_head.safetensors", export.medusa_arrays())
    tensor_files.save_json(os.path.join(out, "config.json"), _tgi_config(export))
    copy_tokenizer("", export.base.directory, out)


def to_tgi_shared(export: Export, out: str) -> None:
    """TGI's second layout: one block a head, logits by the backbone's LM head."""
    export.medusa("TGI")
    heads = export.stored.heads
    if heads.lm_head != "shared" or heads.n_layers != 1:
        raise UserError(
            f"the shared-head layout is for heads with one layer and the backbone's LM head; "
            f"those in {export.stored.source} have {heads.n_layers} and LM head "
            f"{heads.lm_head!r}: --to tgi"
        )
    _save(out, "medusa_lm_head.safetensors", export.blocks("{k}.{j}.linear.{leaf}"))
    config = _tgi_config(export) | {"version": "2"}
    tensor_files.save_json(os.path.join(out, "config.json"), config)
    copy_tokenizer("", export.base.directory, out)


def to_vllm(export: Export, out: str) -> None:
    """What every vLLM with Medusa reads: `model.safetensors` under its own names."""
    export.medusa("vLLM")
    heads, llama = export.stored.heads, export.base.config
    arrays = export.blocks("blocks.{k}.layers.{j}.{leaf}")
    shared = heads.lm_head == "shared"
    for k in range(1 if shared else heads.n_heads):
        arrays[f"lm_heads.{k}.weight"] = export.lm_head(k).T
    _save(out, "model.safetensors", arrays)
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": export.base_name,
        "num_heads": heads.n_heads,
        "num_hidden_layers": heads.n_layers,
        "hidden_size": llama.d_model,
        "vocab_size": llama.vocab_size,
        "truncated_vocab_size": llama.vocab_size,
        # Without it vLLM drops the biases and says nothing.
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "torch_dtype": export.kind.name,
    }
    tensor_files.save_json(os.path.join(out, "config.json"), config)


def to_tensorrt_llm(export: Export, out: str) -> None:
    """What TensorRT-LLM's TensorRT backend (up to 1.1) and the authors' code read: a .pt file."""
    export.medusa("TensorRT-LLM")
    heads = export.stored.heads
    save_torch(os.path.join(_made(out), "medusa_lm_head.pt"), export.medusa_arrays())
    config = {
        "base_model_name_or_path": export.base_name,
        "medusa_num_heads": heads.n_heads,
        "medusa_num_layers": heads.n_layers,
        # The names that its Python interface asks for.
        "num_medusa_heads": heads.n_heads,
        "num_medusa_layers": heads.n_layers,
        "torch_dtype": export.kind.name,
    }
    tensor_files.save_json(os.path.join(out, "config.json"), config)


def to_hydra(export: Export, out: str) -> None:
    """The layout of Hydra's authors: `hydra_lm_head.pt`."""
    heads: Any = export.stored.heads
    if heads.drafter not in ("hydra", "hydrapp"):
        raise UserError(
            f"Hydra's layout is for hydra and hydrapp heads, {export.stored.source} holds "
            f"{heads.drafter} heads"
        )
    if heads.n_layers > 2 and not heads.tie_layers:
        raise UserError(
            f"Hydra's code runs one layer for layers 2 to n; those in {export.stored.source} "
            "differ (heads.tie_layers is false)"
        )
    if heads.lm_head == "shared" or heads.skip == "fixed" or not heads.lm_bias:
        raise UserError(
            "Hydra's code wants heads with LM heads and biases of their own and a learned skip "
            f"connection; those in {export.stored.source} have lm_head {heads.lm_head!r}, "
            f"lm_bias {heads.lm_bias}, skip {heads.skip!r}"
        )
    plus = heads.drafter == "hydrapp"
    arrays: Arrays = {}
    for path, array in export.params.items():
        if not re.search(r"/lm_head/(down|up)$", path):
            for key in hydra_files.keys_of(path, heads.n_layers, plus):
                arrays[key] = array.T if path.endswith("/kernel") else array
    for k in range(heads.n_heads):
        [key] = hydra_files.keys_of(f"heads_{k}/lm_head/kernel", heads.n_layers, plus)
        arrays[key] = export.lm_head(k).T
    embedding = export.base.array("embed_tokens/embedding").astype(export.kind)
    for key in hydra_files.UNUSED if plus else hydra_files.UNUSED[:1]:
        arrays[key] = embedding
    save_torch(os.path.join(_made(out), "hydra_lm_head.pt"), arrays)
    config = {
        "base_model_name_or_path": export.base_name,
        "hydra_num_heads": heads.n_heads,
        "hydra_num_layers": heads.n_layers,
        "hydra_head_arch": "prefix-mlp" if plus else "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
    }
    tensor_files.save_json(os.path.join(out, "config.json"), config)


def to_eagle(export: Export, out: str) -> None:
    """The layout of EAGLE-1's authors: `pytorch_model.bin`."""
    heads: Any = export.stored.heads
    if heads.drafter != "eagle" or heads.lm_head != "shared":
        raise UserError(
            "EAGLE's layout is for eagle heads that share the model's LM head, "
            f"{export.stored.source} holds {heads.drafter} heads with LM head {heads.lm_head!r}"
        )
    arrays: Arrays = {}
    for path, array in export.params.items():
        key, transposed = eagle_files.locate(path)
        arrays[key] = array.T if transposed else array
    embedding = export.base.array("embed_tokens/embedding").astype(export.kind)
    arrays[eagle_files.EMBEDDING] = embedding
    save_torch(os.path.join(_made(out), "pytorch_model.bin"), arrays)
    # Its layers reach back over the whole text.
    config = replace(export.base.config, n_layers=heads.n_layers, sliding_window=0)
    raw = config_to_hf(config) | {"bias": heads.fc_bias, "torch_dtype": export.kind.name}
    tensor_files.save_json(os.path.join(out, "config.json"), raw)


def to_eagle3(export: Export, out: str) -> None:
    """SpecForge's layout of EAGLE-3, which vLLM and SGLang read: `model.safetensors`."""
    drafter = _eagle3_drafter(export, "EAGLE-3's layout")
    if drafter.heads.n_layers != 1 or drafter.taps != drafter.paper_taps:
        raise UserError(
            f"the heads in {export.stored.source} have {drafter.heads.n_layers} layers and read "
            f"{drafter.taps}: EAGLE-3's layout is for one layer and the paper's {drafter.paper_taps}, "
            "since engines do not agree on how it would say others; --to speculators"
        )
    layers, fields = _save_eagle3(export, drafter, out, eagle3_files.LAYER)
    raw = layers | fields | {"architectures": ["LlamaForCausalLMEagle3"]}
    tensor_files.save_json(os.path.join(out, "config.json"), raw)


def to_speculators(export: Export, out: str) -> None:
    """speculators' layout of EAGLE-3, which vLLM reads with its settings: `model.safetensors`."""
    drafter = _eagle3_drafter(export, "speculators' layout")
    # Without it speculators computes with uninitialised memory (c05b95b: it looks for NaN there).
    embedding = export.base.array("embed_tokens/embedding").astype(export.kind)
    layers, fields = _save_eagle3(
        export, drafter, out, eagle3_files.SPECULATORS, {eagle3_files.EMBEDDING: embedding}
    )
    architectures = config_to_hf(export.base.config)["architectures"]
    verifier = {"name_or_path": export.base_name, "architectures": architectures}
    raw = speculators_config.write(layers, fields, drafter.taps, drafter.n_heads, verifier)
    tensor_files.save_json(os.path.join(out, "config.json"), raw)


def _eagle3_drafter(export: Export, layout: str) -> Any:
    """The drafter of EAGLE-3 heads that have an LM head.

    Raises:
      UserError: other heads.
    """
    heads = export.stored.heads
    if heads.drafter != "eagle3" or heads.lm_head != "own":
        raise UserError(
            f"{layout} is for eagle3 heads with an LM head of their own, {export.stored.source} "
            f"holds {heads.drafter} heads with LM head {heads.lm_head!r}"
        )
    return make_drafter(heads, export.base.config)


def _save_eagle3(
    export: Export, drafter: Any, out: str, stem: str, more: Arrays | None = None
) -> tuple[Json, Json]:
    """Write the weights; returns the layers' config.json and the fields of EAGLE-3."""
    stored, config = export.stored, export.base.config
    arrays: Arrays = dict(more or {})
    for path, array in export.params.items():
        key, transposed = eagle3_files.locate(path, stem)
        arrays[key] = array.T if transposed else array
    if stored.ids is not None:
        ids = stored.ids.astype(np.int64)
        arrays[eagle3_files.D2T] = ids - np.arange(len(ids))
        arrays[eagle3_files.T2D] = np.isin(np.arange(config.vocab_size), ids)
    _save(out, "model.safetensors", arrays)
    heads, flags = drafter.heads, eagle3_files.FLAGS
    shape = replace(
        drafter.shape, n_layers=heads.n_layers, sliding_window=0, tie_embeddings=False
    )
    fields = {
        "draft_vocab_size": heads.draft_vocab or config.vocab_size,
        "torch_dtype": export.kind.name,
        **{flag: True for flag in flags if getattr(heads, flag)},
    }
    return config_to_hf(shape), fields


def to_merged(export: Export, out: str) -> None:
    """A full model in Hugging Face format with its heads in it (Medusa v1.0)."""
    from medusa_jax.interop.merge import save_merged

    export.medusa("the full-model layout")
    heads, base = export.stored.heads, export.base
    save_merged(
        _made(out), base, export.medusa_arrays("medusa_head."), export.stored, export.dtype
    )
    raw = tensor_files.read_json(os.path.join(base.directory, "config.json"))
    raw |= {"medusa_num_heads": heads.n_heads, "medusa_num_layers": heads.n_layers}
    if export.dtype:
        raw |= {"torch_dtype": export.dtype, "dtype": export.dtype}
    copy_tokenizer("", base.directory, out)
    tensor_files.save_json(os.path.join(out, "config.json"), raw)


# --to -> (what writes it, what it is for).
TARGETS: dict[str, tuple[Callable[[Export, str], None], str]] = {
    "native": (to_native, "this project's format, bound to the model by its fingerprint"),
    "tgi": (to_tgi, "TGI, and vLLM from 0.28 on"),
    "tgi_shared": (to_tgi_shared, "TGI, heads that share the model's LM head"),
    "vllm": (to_vllm, "any vLLM that has Medusa; EAGLE-3 heads as in speculators"),
    "tensorrt_llm": (to_tensorrt_llm, "TensorRT-LLM up to 1.1, and Medusa's own code"),
    "merged": (to_merged, "model and heads as one Hugging Face model (Medusa v1.0)"),
    "hydra": (to_hydra, "Hydra's own code"),
    "eagle": (to_eagle, "EAGLE's own code"),
    "eagle3": (to_eagle3, "EAGLE-3 in SGLang, vLLM and EAGLE's own code"),
    "speculators": (to_speculators, "EAGLE-3 in vLLM and speculators"),
}
# Of these, layouts that can say which tokens heads score.
WITH_DRAFT_VOCAB = ("native", "eagle3", "speculators")


def _tgi_config(export: Export) -> dict[str, Any]:
    """Fields of both engines; no `architectures`, at which TGI gives the heads up, and no
    `num_attention_heads` or `num_hidden_layers`, which vLLM would take for those of the heads.
    """
    heads, llama = export.stored.heads, export.base.config
    return {
        "model_type": "medusa",
        "base_model_name_or_path": export.base_name,
        "medusa_num_heads": heads.n_heads,
        "medusa_num_layers": heads.n_layers,
        "hidden_size": llama.d_model,
        "vocab_size": llama.vocab_size,
        "truncated_vocab_size": llama.vocab_size,
        "medusa_fc_bias": True,
        "head_dim": llama.head_dim,
        "torch_dtype": export.kind.name,
    }


def _made(out: str) -> str:
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be created: {error.strerror}") from error
    return out


def _save(out: str, name: str, arrays: Arrays) -> None:
    path = os.path.join(_made(out), name)
    tensor_files.save_safetensors(path, arrays, {"format": "pt"})
