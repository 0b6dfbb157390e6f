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

from medusa_jax.arch import HeadsConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.layouts.export import Export
from medusa_jax.files.layouts.stored_heads import Arrays, StoredHeads
from medusa_jax.files.tensor import Tensors, take_rows, whole
from medusa_jax.text.tokenizer_files import copy_tokenizer
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
# The backbone of a full model, or its adapters.
_BACKBONE = re.compile(
    r"(base_model\.model\.)?(model\.(embed_tokens|layers|norm|rotary_emb)|lm_head)\."
)
_TOKEN_MAP = "token_map"


@dataclasses.dataclass(frozen=True)
class Form:
    """How a file names its tensors, and the sizes that its keys show.

    Attributes:
      block, lm_head: keys with {k}, {j}, {leaf}; no `lm_head` if heads score by the backbone's.
      tied: all layers share the weights of the first, which may be the only one in the file.
    """

    block: str
    lm_head: str
    n_heads: int
    n_layers: int
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

    def arrays(self, export: Export) -> Arrays:
        """The tensors of a file: all layers, then the LM heads."""
        heads, layers = range(self.n_heads), range(self.n_layers)
        leaves = ("kernel", "bias")
        paths = [f"heads_{k}/layers_{j}/{x}" for k in heads for j in layers for x in leaves]
        if self.lm_head:
            paths += [f"heads_{k}/lm_head/kernel" for k in heads]
        return export.arrays(self.locate, {path: export.whole[path] for path in paths})


def authors_form(heads: HeadsConfig, stem: str = "{k}.") -> Form:
    """The form of Medusa's authors, `stem` in front of the number of a layer."""
    return Form(
        f"{stem}{{j}}.linear.{{leaf}}", f"{stem}{heads.n_layers}.weight", heads.n_heads,
        heads.n_layers,
    )  # fmt: skip


def vllm_form(heads: HeadsConfig, one: bool, prefix: str = "") -> Form:
    """vLLM's form, with `one` LM head for all, the backbone's or a copy of it."""
    return Form(
        f"{prefix}blocks.{{k}}.layers.{{j}}.{{leaf}}",
        f"{prefix}lm_heads.{'0' if one else '{k}'}.weight", heads.n_heads, heads.n_layers,
    )  # fmt: skip


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
      UserError: another number of layers than in the configuration, or a damaged draft vocabulary.
    """
    vllm, ids = any(VLLM.fullmatch(key) for key in tensors), None
    if vllm:
        tensors, ids = _take_token_map(source, tensors)
    found, prefix = (_find_vllm if vllm else _find_medusa)(tensors, config)
    numbers = {"heads": found.n_heads, "layers": found.n_layers}
    more = {"heads": "num_heads", "layers": "num_hidden_layers"} if vllm else {}
    for what, number in numbers.items():
        told = config.get(more.get(what, ""), config.get(f"medusa_num_{what}"))
        if type(told) is int and told != number:
            problem = f"{source} holds {number} {what}, its config.json says {told}"
            if what == "layers":
                raise UserError(problem)
            inform(problem)
    heads = HeadsConfig(
        n_heads=found.n_heads,
        n_layers=found.n_layers,
        lm_head="own" if found.lm_head else "shared",
        draft_vocab=0 if ids is None else len(ids),
    )
    if vllm and not config.get("medusa_fc_bias"):
        tensors = _with_biases(found, tensors)
    layout, base = HEADS_ONLY, {}
    if prefix.startswith("base_model."):
        layout = ADAPTER
        if not all(is_head_key(key) for key in tensors):
            merge = "unknown (adapters in the same file change it: merge them by PEFT)"
            base = {"fingerprint": merge}
    elif prefix and not vllm:
        layout = FULL_MODEL
        if "model.embed_tokens.weight" in tensors:
            # These heads were trained with their backbone and fit no other.
            base = {"fingerprint": BaseFiles.open(directory).fingerprint()}

    def ignore(key: str) -> bool:
        whole = layout in (FULL_MODEL, ADAPTER)
        return whole and bool(_BACKBONE.match(key) or ".original_module." in key)

    return StoredHeads(
        source=source, directory=directory, layout="vLLM" if vllm else layout, heads=heads,
        tensors=tensors, locate=found.locate, ignore=ignore, meta=config, base=base, ids=ids,
    )  # fmt: skip


def _find_medusa(tensors: Tensors, config: Json) -> tuple[Form, str]:
    found = [m for key in tensors if (m := MEDUSA.fullmatch(key))]
    prefix, _, infix, *_ = found[0].groups()
    first = [(int(m[4]), m[5]) for m in found if m[2] == "0"]
    outs = [j for j, leaf in first if leaf == "weight"]
    layers = {j for j, leaf in first if leaf != "weight"}
    n_layers = outs[0] if outs else max(layers, default=-1) + 1
    tied = layers == {0} and n_layers > 1 and config.get("medusa_num_layers") == n_layers
    n_heads = max(int(m[2]) for m in found) + 1
    form = authors_form(
        HeadsConfig(n_heads=n_heads, n_layers=n_layers), f"{prefix}{{k}}.{infix}"
    )
    return dataclasses.replace(
        form, lm_head=form.lm_head if outs else "", tied=tied
    ), prefix


def _find_vllm(tensors: Tensors, config: Json) -> tuple[Form, str]:
    found = [m for key in tensors if (m := VLLM.fullmatch(key))]
    n_layers = max((int(m[3]) for m in found if m[2]), default=-1) + 1
    n_heads = max(int(m[2] or m[4]) for m in found) + 1
    heads = HeadsConfig(n_heads=n_heads, n_layers=n_layers)
    return vllm_form(heads, bool(config.get("original_lm_head")), found[0][1]), found[0][1]


def _take_token_map(source: str, tensors: Tensors) -> tuple[Tensors, np.ndarray | None]:
    """The tensors without vLLM's draft vocabulary, and its token ids, ascending; None if there is none.

    LM heads have a row for each of these tokens in the map's order, or for all tokens.
    """
    if _TOKEN_MAP not in tensors:
        return tensors, None
    tensors = dict(tensors)
    ids = whole(tensors.pop(_TOKEN_MAP))
    if ids.ndim != 1 or ids.dtype.kind != "i" or len(np.unique(ids)) != len(ids):
        raise UserError(f"{source}: {_TOKEN_MAP} is not a list of different tokens")
    order = np.argsort(ids)
    for key, tensor in tensors.items():
        if "lm_head" in key and len(tensor.shape) == 2:
            rows = order if tensor.shape[0] <= len(ids) else ids[order]
            tensors[key] = take_rows(tensor, rows)
    return tensors, ids[order].astype(np.int32)


def _with_biases(found: Form, tensors: Tensors) -> Tensors:
    """Add zeros for missing biases, which vLLM's blocks do not have by default."""
    added = dict(tensors)
    for k in range(found.n_heads):
        for j in range(found.n_layers):
            weight = tensors.get(found.block.format(k=k, j=j, leaf="weight"))
            if weight is not None:
                zeros = np.zeros(weight.shape[:1], np.float32)
                bias = dataclasses.replace(
                    weight, shape=zeros.shape, read=zeros.__getitem__
                )
                added.setdefault(found.block.format(k=k, j=j, leaf="bias"), bias)
    return added


def to_tgi(export: Export, out: str) -> None:
    """The layout of TGI, and of vLLM from 0.28 on: `medusa_lm_head.safetensors`, separate LM heads."""
    _write_tgi(export, out, authors_form(export.stored.heads), {})


def to_tgi_shared(export: Export, out: str) -> None:
    """TGI's second layout: one block per head, logits by the backbone's LM head."""
    form = dataclasses.replace(authors_form(export.stored.heads), lm_head="")
    _write_tgi(export, out, form, {"version": "2"})


def _write_tgi(export: Export, out: str, form: Form, version: Json) -> None:
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
    export.write(out, "medusa_lm_head.safetensors", form.arrays(export), config | version)
    copy_tokenizer("", export.base.source, out)


def to_vllm(export: Export, out: str) -> None:
    """The layout of every vLLM with Medusa: `model.safetensors` with vLLM's names."""
    heads, llama = export.stored.heads, export.base.config
    shared, ids = heads.lm_head == "shared", export.stored.ids
    arrays = vllm_form(heads, shared).arrays(export)
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
    export.write(out, "medusa_lm_head.pt", authors_form(heads).arrays(export), config)
