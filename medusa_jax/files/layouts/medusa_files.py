"""Medusa heads in published layouts: read (recognised by their keys) and written.

Head k, layer j, L layers (docs/formats.md):

  heads only       {k}.{j}.linear.weight, .bias, and {k}.{L}.weight unless the LM head is shared
  full model       the same with the prefix "medusa_head.", among the keys of the backbone
  adapter          the same with the prefix "base_model.model.medusa_head.", with LoRA weights
  vLLM             blocks.{k}.layers.{j}.weight, .bias, lm_heads.{k}.weight

Heads and layers are counted in the keys, since published configurations give wrong numbers (two heads instead
of five), so that readers that trust them drop or invent heads.
"""

import dataclasses
import re

import numpy as np

from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files.copies import GENERATION, copy_inside, copy_tokenizer_files
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.hf_keys import NOT_OF_TEXT
from medusa_jax.files.layouts.layout import VLLM_COMMAND, Export, HeadFiles, Layout
from medusa_jax.files.layouts.medusa_forms import (
    MEDUSA,
    VLLM,
    Form,
    authors_form,
    authors_form_of,
    is_head_key,
    vllm_form,
    vllm_form_of,
)
from medusa_jax.files.layouts.stored_heads import StoredHeads
from medusa_jax.files.tensor import Tensors, read_whole, take_rows
from medusa_jax.typed import Fields

# `StoredHeads.layout`.
HEADS_ONLY = "Medusa heads"
FULL_MODEL = "Medusa full model"
ADAPTER = "Medusa adapter"
# The backbone of a full model of any family, or its adapters, and the embedding's key.
_BACKBONE = re.compile(
    r"(base_model\.model\.)?((model\.|language_model\.)*(embed_tokens|layers|norm|rotary_emb|lm_head)"
    r"|transformer\.(wte|h|ln_f))\."
)
_EMBEDDINGS = ("embed_tokens.weight", "transformer.wte.weight")
_TOKEN_MAP = "token_map"


class MedusaFiles(Layout):
    """The authors' keys: heads alone, in a full model, or as an adapter. Written for TGI."""

    name = "tgi"
    drafters = ("medusa",)
    loading = (
        "TGI: `--model-id {out} --speculate {heads}` (the base model must be in the cache or "
        f"a local directory). vLLM from 0.28 on: {VLLM_COMMAND}"
    )

    def fits(self, tensors: Tensors) -> bool:
        return any(MEDUSA.fullmatch(key) for key in tensors)

    def open(self, files: HeadFiles) -> StoredHeads:
        """Describe the heads.

        Raises:
          UserError: another number of layers than in the configuration.
        """
        tensors = files.tensors
        form, prefix = authors_form_of(tensors, files.config)
        check_count(files, "heads", form.n_heads, "medusa_num_heads")
        check_count(files, "layers", form.n_layers, "medusa_num_layers")
        layout, base = HEADS_ONLY, {}
        if prefix.startswith("base_model."):
            layout = ADAPTER
            if not all(is_head_key(key) for key in tensors):
                merge = "unknown (adapters in the same file change it: merge them by PEFT)"
                base = {"fingerprint": merge}
        elif prefix:
            layout = FULL_MODEL
            if any(key.endswith(_EMBEDDINGS) for key in tensors):
                # These heads were trained with their backbone and fit no other.
                base = {"fingerprint": BaseFiles.open(files.directory).fingerprint()}

        def ignore(key: str) -> bool:
            of_backbone = _BACKBONE.match(key) or NOT_OF_TEXT.match(key)
            return layout != HEADS_ONLY and bool(of_backbone or ".original_module." in key)

        return StoredHeads(
            source=files.source,
            directory=files.directory,
            layout=layout,
            heads=form.heads(),
            tensors=tensors,
            locate=form.locate,
            ignore=ignore,
            meta=files.config,
            copied_lm_heads=form.lm_heads,
            base=base,
        )

    def write(self, export: Export, out: str) -> None:
        """`medusa_lm_head.safetensors`, separate LM heads, the backbone's tokenizer and fields for both engines.

        Not `architectures`, with which TGI does not load the heads, nor `num_attention_heads` and
        `num_hidden_layers`, which vLLM would take for the heads'.
        """
        heads, llama = export.stored.heads, export.base.config
        config = {
            "model_type": "medusa",
            "base_model_name_or_path": export.base_name,
            "medusa_num_heads": heads.n_heads,
            "medusa_num_layers": heads.n_layers,
            "hidden_size": llama.d_model,
            "vocab_size": llama.vocab_size,
            "truncated_vocab_size": llama.vocab_size,
            "medusa_fc_bias": True,
            "head_dim": llama.head_dim,
        }
        arrays = authors_form(heads.n_heads, heads.n_layers).arrays(export)
        export.write(out, "medusa_lm_head.safetensors", arrays, config)
        model = export.base.source
        if not copy_tokenizer_files(model, out):
            inform(f"{model} holds no tokenizer, which TGI expects next to the heads")
        copy_inside(model, GENERATION, out)


class MedusaForVLLM(Layout):
    """vLLM's keys in `model.safetensors`, which every vLLM with Medusa reads."""

    name = "vllm"
    drafters, draft_vocab = ("medusa",), True
    loading = f"{VLLM_COMMAND}. With more tokens than heads, random weights would draft the rest without a warning"

    def fits(self, tensors: Tensors) -> bool:
        return any(VLLM.fullmatch(key) for key in tensors)

    def open(self, files: HeadFiles) -> StoredHeads:
        """Describe the heads.

        Raises:
          UserError: another number of layers than in the configuration, or a damaged draft vocabulary.
        """
        tensors, ids = _take_token_map(files.source, files.tensors)
        form = vllm_form_of(tensors, files.config)
        check_count(files, "heads", form.n_heads, "num_heads", "medusa_num_heads")
        check_count(
            files, "layers", form.n_layers, "num_hidden_layers", "medusa_num_layers"
        )
        if not files.config.get("medusa_fc_bias"):
            tensors = _with_biases(form, tensors)
        return StoredHeads(
            source=files.source,
            directory=files.directory,
            layout="vLLM",
            heads=form.heads(draft_vocab=0 if ids is None else len(ids)),
            tensors=tensors,
            locate=form.locate,
            meta=files.config,
            ids=ids,
            copied_lm_heads=form.lm_heads,
        )

    def write(self, export: Export, out: str) -> None:
        """Write them, with one LM head if they share it."""
        heads, llama = export.stored.heads, export.base.config
        shared, ids = heads.lm_head == "shared", export.stored.ids
        arrays = vllm_form(heads.n_heads, heads.n_layers, shared).arrays(export)
        if (
            ids is not None
        ):  # vLLM itself takes the rows of these tokens from a whole LM head
            arrays[_TOKEN_MAP] = ids.astype(np.int64)
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "base_model_name_or_path": export.base_name,
            "num_heads": heads.n_heads,
            "num_hidden_layers": heads.n_layers,
            "hidden_size": llama.d_model,
            "vocab_size": llama.vocab_size,
            "truncated_vocab_size": llama.vocab_size if ids is None else len(ids),
            # Without it vLLM drops the biases silently.
            "medusa_fc_bias": True,
            "original_lm_head": shared,
        }
        export.write(out, "model.safetensors", arrays, config)


def check_count(files: HeadFiles, what: str, count: int, *fields: str) -> None:
    """Compare a number of heads or layers with the first of these fields of config.json that has a value.

    Raises:
      UserError: no number, or another number of layers; of heads the keys decide, and the user is told.
    """
    config = files.config
    name = next((name for name in fields if config.get(name) is not None), None)
    number = Fields(files.config_file, config).count(name, least=0) if name else count
    if number == count:
        return
    problem = f"{files.source} holds {count} {what}, its config.json says {number}"
    if what == "layers":
        raise UserError(problem)
    inform(problem)


def _take_token_map(source: str, tensors: Tensors) -> tuple[Tensors, np.ndarray | None]:
    """The tensors without vLLM's draft vocabulary, and its token ids, ascending; None if there is none.

    LM heads have a row for each of these tokens in the map's order, or for all tokens.
    """
    if _TOKEN_MAP not in tensors:
        return tensors, None
    tensors = dict(tensors)
    ids = read_whole(tensors.pop(_TOKEN_MAP))
    listed = ids.ndim == 1 and ids.dtype.kind == "i" and ids.size
    if not listed or len(np.unique(ids)) != len(ids) or ids.min() < 0:
        raise UserError(f"{source}: {_TOKEN_MAP} is not a list of different tokens")
    order = np.argsort(ids)
    for key, tensor in tensors.items():
        if "lm_head" in key and len(tensor.shape) == 2:
            rows = order if tensor.shape[0] == len(ids) else ids[order]
            tensors[key] = take_rows(tensor, rows)
    return tensors, ids[order].astype(np.int32)


def _with_biases(form: Form, tensors: Tensors) -> Tensors:
    """Add zeros for missing biases, which vLLM's blocks do not have by default."""
    added = dict(tensors)
    for k in range(form.n_heads):
        for j in range(form.n_layers):
            weight = tensors.get(form.block.format(k=k, j=j, leaf="weight"))
            if weight is not None:
                zeros = np.zeros(weight.shape[:1], np.float32)
                bias = dataclasses.replace(
                    weight, shape=zeros.shape, read=zeros.__getitem__
                )
                added.setdefault(form.block.format(k=k, j=j, leaf="bias"), bias)
    return added
