"""Medusa heads in published layouts: read (recognised by their keys) and written.

Head k, layer j, L layers (docs/formats.md):

  heads only       {k}.{j}.linear.weight, .bias, and {k}.{L}.weight unless the LM head is shared
  full model       the same with the prefix "medusa_head.", among the keys of the backbone
  adapter          the same with the prefix "base_model.model.medusa_head.", with LoRA weights
  vLLM             blocks.{k}.layers.{j}.weight, .bias, lm_heads.{k}.weight

Heads and layers are counted in the keys, since published configurations give wrong numbers (two heads instead
of five), so that readers that trust them drop or invent heads. `merge.py` writes the full model.
"""

import dataclasses
import re

import numpy as np

from medusa_jax.arch import HeadsConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.formats.export import Export
from medusa_jax.interop.base_files import BaseFiles
from medusa_jax.interop.stored_heads import Arrays, StoredHeads
from medusa_jax.interop.tensor import Index, Tensor, Tensors, take_rows, whole
from medusa_jax.interop.tokenizer_files import copy_tokenizer
from medusa_jax.whole_files import Json

# `StoredHeads.layout`.
HEADS_ONLY = "Medusa heads"
FULL_MODEL = "Medusa full model"
ADAPTER = "Medusa adapter"

_PREFIX = r"(?:base_model\.model\.)?(?:model\.)?medusa_head\."
MEDUSA = re.compile(
    # PEFT keeps its wrapper's names when a whole model is saved instead of its adapter.
    rf"({_PREFIX}|)(\d+)\.(modules_to_save\.\w+\.|)(\d+)\.(linear\.(?:weight|bias)|weight)"
)
VLLM = re.compile(
    r"(medusa_heads\.|)(?:blocks\.(\d+)\.layers\.(\d+)\.(?:weight|bias)|lm_heads\.(\d+)\.weight)"
)
_TOKEN_MAP = "token_map"
_VLLM_HEADS = ("num_heads", "medusa_num_heads")
_VLLM_LAYERS = ("num_hidden_layers", "medusa_num_layers")


@dataclasses.dataclass(frozen=True)
class _Names:
    """The keys of a layout for heads of L layers; `lm_head` is "" if shared."""

    block: str
    lm_head: str
    # All layers share the weights of the first, which may be the only one in the file.
    tied: bool = False

    def locate(self, path: str) -> tuple[str, bool]:
        """A path of `heads/medusa.py` -> (key, whether it is stored transposed)."""
        match = re.fullmatch(r"heads_(\d+)/(?:layers_(\d+)|lm_head)/(kernel|bias)", path)
        assert match is not None, path
        k, j, leaf = match.groups()
        if j is None:
            return self.lm_head.format(k=k), True
        leaf = {"kernel": "weight"}.get(leaf, leaf)
        layer = 0 if self.tied else j
        return self.block.format(k=k, j=layer, leaf=leaf), leaf == "weight"


def fits(tensors: Tensors) -> bool:
    """Whether a file holds Medusa heads in one of these layouts."""
    return any(MEDUSA.fullmatch(key) or VLLM.fullmatch(key) for key in tensors)


def is_head_key(key: str) -> bool:
    """Whether a key of a full model belongs to its Medusa heads."""
    return re.match(_PREFIX, key) is not None


def open_heads(source: str, directory: str, tensors: Tensors, config: Json) -> StoredHeads:
    """Describe the Medusa heads of a file.

    Args:
      source: the file, for messages.
      directory: its directory.
      config: `config.json` from there, {} if it does not exist.

    Raises:
      UserError: other layers than in the configuration, or a truncated vocabulary.
    """
    vllm = any(VLLM.fullmatch(key) for key in tensors)
    opened = _open_vllm if vllm else _open_medusa
    stored = opened(source, directory, tensors, config)
    if stored.layout == FULL_MODEL and "model.embed_tokens.weight" in tensors:
        # These heads were trained with their backbone and fit no other.
        record = {"fingerprint": BaseFiles.open(directory).fingerprint()}
        stored = dataclasses.replace(stored, base=record)
    return stored


def _open_medusa(
    source: str, directory: str, tensors: Tensors, config: Json
) -> StoredHeads:
    found = [m for key in tensors if (m := MEDUSA.fullmatch(key))]
    prefix, _, infix, *_ = found[0].groups()
    stem = f"{prefix}{{k}}.{infix}"
    first = [(int(m[4]), m[5]) for m in found if m[2] == "0"]
    outs = [j for j, leaf in first if leaf == "weight"]
    layers = {j for j, leaf in first if leaf != "weight"}
    declared = _number(config, "medusa_num_layers")
    n_layers = outs[0] if outs else max(layers, default=-1) + 1
    tied = layers == {0} and n_layers > 1 and declared == n_layers
    names = _Names(f"{stem}{{j}}.linear.{{leaf}}", f"{stem}{n_layers}.weight", tied)
    _check_layers(source, n_layers, declared)
    heads = HeadsConfig(
        n_heads=_count(source, {int(m[2]) for m in found}, config, "medusa_num_heads"),
        n_layers=n_layers,
        lm_head="own" if outs else "shared",
    )
    stored = StoredHeads(
        source, directory, HEADS_ONLY, heads, tensors, names.locate, meta=config
    )
    if not prefix:
        return stored
    stored = dataclasses.replace(stored, layout=FULL_MODEL, ignore=_is_no_head_key)
    if not prefix.startswith("base_model."):
        return stored
    others = any(not is_head_key(key) for key in tensors)
    needs = "adapters of the backbone that they were trained with" if others else ""
    return dataclasses.replace(stored, layout=ADAPTER, needs=needs)


def _is_no_head_key(key: str) -> bool:
    """Whether a key of a full model or an adapter does not belong to the heads."""
    return not is_head_key(key) or ".original_module." in key


def _open_vllm(source: str, directory: str, tensors: Tensors, config: Json) -> StoredHeads:
    tensors, ids = _take_token_map(source, tensors)
    found = [m for key in tensors if (m := VLLM.fullmatch(key))]
    prefix = found[0][1]
    blocks = [(int(m[2]), int(m[3])) for m in found if m[2]]
    n_layers = max((j for _, j in blocks), default=-1) + 1
    # One LM head for all, the backbone's or a copy of it.
    shared = bool(config.get("original_lm_head"))
    names = _Names(
        f"{prefix}blocks.{{k}}.layers.{{j}}.{{leaf}}",
        f"{prefix}lm_heads.{'0' if shared else '{k}'}.weight",
    )
    _check_layers(source, n_layers, _number(config, *_VLLM_LAYERS))
    numbers = {k for k, _ in blocks} | {int(m[4]) for m in found if m[4]}
    n_heads = _count(source, numbers, config, *_VLLM_HEADS)
    draft_vocab = 0 if ids is None else len(ids)
    heads = HeadsConfig(n_heads=n_heads, n_layers=n_layers, draft_vocab=draft_vocab)
    if not config.get("medusa_fc_bias"):
        tensors = _with_biases(names, heads, tensors)
    return StoredHeads(
        source, directory, "vLLM", heads, tensors, names.locate, meta=config, ids=ids
    )


def _take_token_map(source: str, tensors: Tensors) -> tuple[Tensors, np.ndarray | None]:
    """The tensors without vLLM's draft vocabulary, and its token ids, ascending; None if there is none.

    LM heads have a row for each of these tokens in the map's order, or for all tokens.
    """
    if _TOKEN_MAP not in tensors:
        return tensors, None
    tensors = dict(tensors)
    ids = whole(tensors.pop(_TOKEN_MAP))
    if ids.ndim != 1 or ids.dtype.kind != "i" or len(np.unique(ids)) != len(ids):
        raise UserError(f"{source}: {_TOKEN_MAP} is no list of different tokens")
    order = np.argsort(ids)
    for key, tensor in tensors.items():
        if "lm_head" in key and len(tensor.shape) == 2:
            rows = order if tensor.shape[0] <= len(ids) else ids[order]
            tensors[key] = take_rows(tensor, rows)
    return tensors, ids[order].astype(np.int32)


def _with_biases(names: _Names, heads: HeadsConfig, tensors: Tensors) -> Tensors:
    """Add zeros for missing biases, which vLLM's blocks do not have by default."""
    added = dict(tensors)
    for k in range(heads.n_heads):
        for j in range(heads.n_layers):
            weight = tensors.get(names.block.format(k=k, j=j, leaf="weight"))
            bias = names.block.format(k=k, j=j, leaf="bias")
            if bias not in tensors and weight is not None:
                added[bias] = _zeros(weight.file, weight.shape[:1], weight.dtype)
    return added


def _zeros(file: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    def read(index: Index) -> np.ndarray:
        return np.zeros(shape, np.float32)[index]

    return Tensor(file, shape, dtype, read)


def _count(source: str, numbers: set[int], config: Json, *fields: str) -> int:
    """The number of heads in a file; says so where the configuration has another number."""
    count = max(numbers) + 1
    if (declared := _number(config, *fields) or count) != count:
        inform(
            f"{source} holds {count} heads, its config.json says {declared}: {count} are read"
        )
    return count


def _number(config: Json, *names: str) -> int | None:
    """The first of these fields of the configuration that is an integer."""
    values = [config[name] for name in names if type(config.get(name)) is int]
    return values[0] if values else None


def _check_layers(source: str, found: int, declared: int | None) -> None:
    if declared not in (None, found):
        raise UserError(
            f"{source} holds {found} layers per head, its config.json says {declared}"
        )


def _blocks(export: Export, name: str) -> Arrays:
    """The residual blocks as torch's Linear stores them, under `name` with {k}, {j}, {leaf}."""
    heads, out = export.stored.heads, {}
    for k in range(heads.n_heads):
        for j in range(heads.n_layers):
            path = f"heads_{k}/layers_{j}"
            out[name.format(k=k, j=j, leaf="weight")] = export.params[f"{path}/kernel"].T
            out[name.format(k=k, j=j, leaf="bias")] = export.params[f"{path}/bias"]
    return out


def medusa_arrays(export: Export, prefix: str = "") -> Arrays:
    """{prefix}{k}.{j}.linear.weight, .bias and {prefix}{k}.{L}.weight."""
    heads = export.stored.heads
    out = _blocks(export, f"{prefix}{{k}}.{{j}}.linear.{{leaf}}")
    for k in range(heads.n_heads):
        out[f"{prefix}{k}.{heads.n_layers}.weight"] = export.lm_head(k).T
    return out


def to_tgi(export: Export, out: str) -> None:
    """The layout of TGI, and of vLLM from 0.28 on: `medusa_lm_head.safetensors`, separate LM heads."""
    _write_tgi(export, out, medusa_arrays(export), {})


def to_tgi_shared(export: Export, out: str) -> None:
    """TGI's second layout: one block per head, logits by the backbone's LM head."""
    _write_tgi(export, out, _blocks(export, "{k}.{j}.linear.{leaf}"), {"version": "2"})


def _write_tgi(export: Export, out: str, arrays: Arrays, version: Json) -> None:
    """Write fields for both engines.

    Not `architectures`, with which TGI does not load the heads, nor `num_attention_heads` and
    `num_hidden_layers`, which vLLM would take for the heads' own.
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
        "torch_dtype": export.kind.name,
    }
    export.write(out, "medusa_lm_head.safetensors", arrays, config | version)
    copy_tokenizer("", export.base.directory, out)


def to_vllm(export: Export, out: str) -> None:
    """The layout of every vLLM with Medusa: `model.safetensors` with vLLM's names."""
    heads, llama = export.stored.heads, export.base.config
    arrays = _blocks(export, "blocks.{k}.layers.{j}.{leaf}")
    shared = heads.lm_head == "shared"
    ids = export.stored.ids
    for k in range(1 if shared else heads.n_heads):
        arrays[f"lm_heads.{k}.weight"] = export.lm_head(k).T
    if ids is not None:  # vLLM itself takes the rows of these tokens from a whole LM head
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
        "torch_dtype": export.kind.name,
    }
    export.write(out, "model.safetensors", arrays, config)


def to_tensorrt_llm(export: Export, out: str) -> None:
    """The layout of TensorRT-LLM's TensorRT backend (up to 1.1) and of the authors' code: a .pt file."""
    heads = export.stored.heads
    config = {
        "base_model_name_or_path": export.base_name,
        "medusa_num_heads": heads.n_heads,
        "medusa_num_layers": heads.n_layers,
        # The names in its Python interface.
        "num_medusa_heads": heads.n_heads,
        "num_medusa_layers": heads.n_layers,
        "torch_dtype": export.kind.name,
    }
    export.write(out, "medusa_lm_head.pt", medusa_arrays(export), config)
