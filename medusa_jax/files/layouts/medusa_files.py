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
from medusa_jax.files.copies import GENERATION, copy_inside, copy_tokenizer_files
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.layouts.layout import Export, HeadFiles, Layout
from medusa_jax.files.layouts.stored_heads import Arrays, StoredHeads
from medusa_jax.files.tensor import Tensors, take_rows, whole
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

    def heads(self, draft_vocab: int = 0) -> HeadsConfig:
        """The configuration of the heads."""
        return HeadsConfig(
            n_heads=self.n_heads,
            n_layers=self.n_layers,
            lm_head="own" if self.lm_head else "shared",
            draft_vocab=draft_vocab,
        )

    def arrays(self, export: Export) -> Arrays:
        """The tensors of a file: all layers, then the LM heads."""
        heads, layers = range(self.n_heads), range(self.n_layers)
        leaves = ("kernel", "bias")
        paths = [f"heads_{k}/layers_{j}/{x}" for k in heads for j in layers for x in leaves]
        if self.lm_head:
            paths += [f"heads_{k}/lm_head/kernel" for k in heads]
        return export.arrays(self.locate, {path: export.whole[path] for path in paths})


def authors_form(n_heads: int, n_layers: int, stem: str = "{k}.") -> Form:
    """The form of Medusa's authors, `stem` in front of the number of a layer."""
    block, lm_head = f"{stem}{{j}}.linear.{{leaf}}", f"{stem}{n_layers}.weight"
    return Form(block, lm_head, n_heads, n_layers)


def vllm_form(n_heads: int, n_layers: int, one: bool, prefix: str = "") -> Form:
    """vLLM's form, with `one` LM head for all, the backbone's or a copy of it."""
    block = f"{prefix}blocks.{{k}}.layers.{{j}}.{{leaf}}"
    lm_head = f"{prefix}lm_heads.{'0' if one else '{k}'}.weight"
    return Form(block, lm_head, n_heads, n_layers)


class MedusaFiles(Layout):
    """The authors' keys: heads alone, in a full model, or as an adapter. Written for TGI."""

    name = "tgi"
    drafters = ("medusa",)
    loading = (
        "TGI: `--model-id {out} --speculate {heads}` (the base model must be in the cache or "
        'a local directory). vLLM from 0.28 on: `speculative_config={{"method": "medusa", "model": '
        '"{out}", "num_speculative_tokens": {heads}}}`'
    )

    def fits(self, tensors: Tensors) -> bool:
        """Whether a file holds Medusa heads under their authors' keys."""
        return any(MEDUSA.fullmatch(key) for key in tensors)

    def open(self, files: HeadFiles) -> StoredHeads:
        """Describe the heads.

        Raises:
          UserError: another number of layers than in the configuration.
        """
        tensors = files.tensors
        form, prefix = _authors_form_of(files)
        _check_count(files, "heads", form.n_heads, "medusa_num_heads")
        _check_count(files, "layers", form.n_layers, "medusa_num_layers")
        layout, base = HEADS_ONLY, {}
        if prefix.startswith("base_model."):
            layout = ADAPTER
            if not all(is_head_key(key) for key in tensors):
                merge = "unknown (adapters in the same file change it: merge them by PEFT)"
                base = {"fingerprint": merge}
        elif prefix:
            layout = FULL_MODEL
            if "model.embed_tokens.weight" in tensors:
                # These heads were trained with their backbone and fit no other.
                base = {"fingerprint": BaseFiles.open(files.directory).fingerprint()}

        def ignore(key: str) -> bool:
            with_backbone = layout in (FULL_MODEL, ADAPTER)
            return with_backbone and bool(
                _BACKBONE.match(key) or ".original_module." in key
            )

        return StoredHeads(
            source=files.source,
            directory=files.directory,
            layout=layout,
            heads=form.heads(),
            tensors=tensors,
            locate=form.locate,
            ignore=ignore,
            meta=files.config,
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
            "torch_dtype": export.kind.name,
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
    drafters = ("medusa",)
    loading = (
        '`speculative_config={{"method": "medusa", "model": "{out}", '
        '"num_speculative_tokens": {heads}}}`. With more tokens than heads, random weights '
        "would draft the rest without a warning"
    )
    draft_vocab = True

    def fits(self, tensors: Tensors) -> bool:
        """Whether a file holds Medusa heads under vLLM's keys."""
        return any(VLLM.fullmatch(key) for key in tensors)

    def open(self, files: HeadFiles) -> StoredHeads:
        """Describe the heads.

        Raises:
          UserError: another number of layers than in the configuration, or a damaged draft vocabulary.
        """
        tensors, ids = _take_token_map(files.source, files.tensors)
        form = _vllm_form_of(tensors, files.config)
        _check_count(files, "heads", form.n_heads, "num_heads", "medusa_num_heads")
        _check_count(
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
        )

    def write(self, export: Export, out: str) -> None:
        """With one LM head if the heads share it."""
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
            "torch_dtype": export.kind.name,
        }
        export.write(out, "model.safetensors", arrays, config)


def is_head_key(key: str) -> bool:
    """Whether a key of a full model or an adapter belongs to its Medusa heads."""
    return re.match(_PREFIX, key) is not None


def _check_count(files: HeadFiles, what: str, count: int, *fields: str) -> None:
    """Compare a number of heads or layers with the first of these fields of config.json that exists.

    Raises:
      UserError: another number of layers; of heads the keys decide, and the user is told.
    """
    described = next((files.config[name] for name in fields if name in files.config), None)
    if type(described) is not int or described == count:
        return
    problem = f"{files.source} holds {count} {what}, its config.json says {described}"
    if what == "layers":
        raise UserError(problem)
    inform(problem)


def _authors_form_of(files: HeadFiles) -> tuple[Form, str]:
    """The form of a file under the authors' keys, and the prefix of its keys."""
    matches = [match for key in files.tensors if (match := MEDUSA.fullmatch(key))]
    prefix, _, infix, *_ = matches[0].groups()
    first_head = [(int(m[4]), m[5]) for m in matches if m[2] == "0"]
    lm_heads = [j for j, leaf in first_head if leaf == "weight"]
    layers = {j for j, leaf in first_head if leaf != "weight"}
    n_layers = lm_heads[0] if lm_heads else max(layers, default=-1) + 1
    described = files.config.get("medusa_num_layers")
    tied = layers == {0} and n_layers > 1 and described == n_layers
    n_heads = max(int(m[2]) for m in matches) + 1
    form = authors_form(n_heads, n_layers, f"{prefix}{{k}}.{infix}")
    lm_head = form.lm_head if lm_heads else ""
    return dataclasses.replace(form, lm_head=lm_head, tied=tied), prefix


def _vllm_form_of(tensors: Tensors, config: Json) -> Form:
    """The form of a file under vLLM's keys."""
    matches = [match for key in tensors if (match := VLLM.fullmatch(key))]
    n_layers = max((int(m[3]) for m in matches if m[2]), default=-1) + 1
    n_heads = max(int(m[2] or m[4]) for m in matches) + 1
    one = bool(config.get("original_lm_head"))
    return vllm_form(n_heads, n_layers, one, matches[0][1])


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
