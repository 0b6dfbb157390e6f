"""EAGLE-3 heads as EAGLE's authors, SpecForge and speculators write them, recognised by their keys.

  midlayer.self_attn.{q,k,v}_proj.weight   [., 2 D]: embedding first; o_proj, mlp.* as in a Llama model
  midlayer.{hidden_norm,input_layernorm,post_attention_layernorm}.weight, norm.weight
  fc.weight                                [D, A D] for A streams, lowest first; fc_norm.{a}.weight (3.1)
  lm_head.weight                           [O, D], O tokens
  d2t [O] int64, t2d [V] bool              token id - place among the O; which of V tokens they are, if there
  embed_tokens.weight                      the backbone's, refused if it is another

speculators and Model-Optimizer call the layer `layers.0`, and there may be more. `model.safetensors` or
`pytorch_model.bin` is next to a `config.json` of the layer: its sizes, its rotation (without `rope_theta` 10,000 and
not the backbone's) and 3.1's flags. speculators has the layer's fields in a separate table, flags and tapped
layers next to it (`speculators_config.py`). In other files the keys tell the number of layers; sizes that contradict the
keys are refused. Engines ignore unknown flags; here one that may change the computation is refused (`other_fields.py`).
"""

import re
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.files.hf_config import check_like_llama, parse_config
from medusa_jax.files.hf_keys import LM_HEAD
from medusa_jax.files.hf_writer import config_to_hf
from medusa_jax.files.layouts import speculators_config
from medusa_jax.files.layouts.eagle_files import EMBEDDING_COPY, ignore, locate_in_layers
from medusa_jax.files.layouts.layout import VLLM_COMMAND, Export, HeadFiles, Layout
from medusa_jax.files.layouts.other_fields import check_others
from medusa_jax.files.layouts.stored_heads import Arrays, StoredHeads
from medusa_jax.files.layouts.tapped_files import (
    drafter_of,
    out_of_order,
    shape_of,
    shared_lm_head,
    take_ids,
    verifier,
    vocabulary_arrays,
)
from medusa_jax.files.tensor import Tensors
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.heads.tapped import TappedDrafter
from medusa_jax.typed import Fields
from medusa_jax.whole_files import Json

# The first layer, in files of EAGLE and SpecForge and of speculators.
_LAYER, _SPECULATORS = "midlayer.", "layers.0."
_NUMBERED = re.compile(r"layers\.(\d+)\.")
_FLAGS = ("fc_norm", "norm_output", "norm_before_residual")
# Layers whose input is read; none: 2, L / 2, L - 3.
TAPS = "eagle_aux_hidden_state_layer_ids"
# Fields of speculators that are read here.
SPECULATORS_FIELDS = {*_FLAGS, "norm_before_fc", "embed_requires_grad"}
# Tokens that engines draft at a time by default.
SPECULATIVE_TOKENS = 4

# Expected values; others would change the computation.
EXPECTED = {
    "norm_before_fc": (False,), "attention_bias": (False,), "mlp_bias": (False,),
    "use_sliding_window": (False,), "use_last_layernorm": (True,),
    "use_input_layernorm_in_first_layer": (True,), "use_mtp_layernorm": (False,),
    "embed_requires_grad": (False,), "parallel_draft_step": (1,), "use_aux_hidden_state": (True,),
    "position_embedding_type": ("rope",), "is_causal": (True,), "causal": (True,),
}  # fmt: skip


class Eagle3Files(Layout):
    """`model.safetensors` and `config.json` as SpecForge writes them and vLLM and SGLang read them."""

    name = "eagle3"
    drafters, draft_vocab = ("eagle3",), True
    loading = (
        f"vLLM: {VLLM_COMMAND}; SGLang: "
        "`--speculative-algorithm EAGLE3 --speculative-draft-model-path {out}`"
    )
    # In the written config.json.
    architecture: ClassVar[str] = "LlamaForCausalLMEagle3"

    def why_not(self, heads: HeadsConfig, llama: LlamaConfig | None) -> str:
        """One layer, which reads the streams of the paper."""
        if heads.n_layers != 1:
            return f"--to eagle3 holds one layer, not {heads.n_layers}: --to speculators"
        if (reason := unstorable(heads, llama)) or llama is None:
            return reason
        drafter = drafter_of(heads, llama)
        if drafter.taps == drafter.paper_taps:
            return ""
        return (
            f"--to eagle3 is for the paper's tapped layers {drafter.paper_taps}, not {drafter.taps}, since engines "
            "do not agree on how it would say others: --to speculators"
        )

    def fits(self, tensors: Tensors) -> bool:
        norms = {f"{stem}hidden_norm.weight" for stem in (_LAYER, _SPECULATORS)}
        return "fc.weight" in tensors and not norms.isdisjoint(tensors)

    def open(self, files: HeadFiles) -> StoredHeads:
        """Describe the heads, those of speculators too.

        Raises:
          UserError: unknown, ambiguous or unsupported fields; a vocabulary that contradicts itself.
        """
        source, file, config = files.source, files.config_file, files.config
        tensors = files.tensors
        taps, depth = "", {}
        if speculators_config.TYPE in config:
            fields, tapped = speculators_config.read(
                file, config, ("eagle3",), SPECULATORS_FIELDS, TAPS
            )
            taps = ",".join(map(str, tapped))
            if "norm_before_residual" not in config:
                raise UserError(
                    f"{file} does not say norm_before_residual, which is false in speculators and true in "
                    "vLLM: add it"
                )
        else:
            table = Fields(file, config).table("eagle_config")
            fields = config | {k: x for k, x in table.items() if x not in (None, [])}
            depth = _depth(file, fields.get(TAPS))
            stored = {m[1] for key in tensors if (m := _NUMBERED.match(key))}
            fields["num_hidden_layers"] = len(stored) or 1
        # The last has an effect only with `parallel_draft_step`.
        known = {*_FLAGS, *EXPECTED, "parallel_draft_heads_num_layers"}
        check_others(file, fields, known)
        layer = parse_config(file, fields)
        check_like_llama(file, layer)
        n_taps = sum(tensors["fc.weight"].shape[1:]) // layer.d_model
        counts = {
            "target_hidden_size": (layer.d_model,),
            "num_aux_hidden_states": (n_taps,),
        }
        Fields(file, fields).expect(EXPECTED | counts)
        if layer.qk_norm or layer.qkv_bias:
            raise UserError(
                f"{file}: layers of {fields['model_type']} are not supported (only a Llama's)"
            )
        config_fields = Fields(
            file, {name: x for name, x in fields.items() if x is not None}
        )
        shape, sizes = shape_of(layer)
        ids = take_ids(source, tensors, layer.vocab_size, (LM_HEAD,))
        outputs = layer.vocab_size if ids is None else len(ids)
        size = fields.get("draft_vocab_size") or outputs
        if size != outputs:
            raise UserError(
                f"{file}: draft_vocab_size {size!r}, {source} has {outputs} tokens"
            )
        flags: Json = {flag: config_fields.switch(flag) for flag in _FLAGS}
        draft_vocab = 0 if ids is None else len(ids)
        heads = Eagle3Config(tap_layers=taps, draft_vocab=draft_vocab, **flags, **sizes)
        stem = _LAYER if f"{_LAYER}hidden_norm.weight" in tensors else _SPECULATORS
        return StoredHeads(
            source=source,
            directory=files.directory,
            layout="EAGLE-3 heads",
            heads=heads,
            tensors=tensors,
            locate=partial(_locate, stem=stem),
            ignore=ignore,
            meta=config,
            layers=shape | depth,
            ids=ids,
            copied_lm_heads=(LM_HEAD,),
            copied_embedding=EMBEDDING_COPY,
        )

    def write(self, export: Export, out: str) -> None:
        """Write in the form of SpecForge."""
        layers, fields = _config(
            export, drafter_of(export.stored.heads, export.base.config)
        )
        config = layers | fields | {"architectures": [self.architecture]}
        export.write(out, "model.safetensors", self.arrays(export), config)

    def arrays(self, export: Export) -> Arrays:
        """The tensors to write by their keys."""
        return _arrays(export, _LAYER)


class SpeculatorsEagle3(Eagle3Files):
    """`model.safetensors` and `config.json` of speculators, which vLLM reads, too."""

    name = "speculators"
    loading = speculators_config.LOADING

    def why_not(self, heads: HeadsConfig, llama: LlamaConfig | None) -> str:
        """Any number of layers, which read streams in order."""
        return unstorable(heads, llama)

    def write(self, export: Export, out: str) -> None:
        """Write them with the backbone's embedding."""
        drafter = drafter_of(export.stored.heads, export.base.config)
        layers, fields = _config(export, drafter)
        flags = dict.fromkeys(sorted(SPECULATORS_FIELDS - {"embed_requires_grad"}), False)
        if (n_taps := len(drafter.taps)) != 3:  # vLLM does not count `TAPS`
            layers["num_aux_hidden_states"] = n_taps
        config = speculators_config.write(
            kind="eagle3",
            architecture="Eagle3DraftModel",
            layers=layers,
            fields=flags | fields | {TAPS: list(drafter.taps)},
            tokens=min(drafter.n_heads, SPECULATIVE_TOKENS),
            verifier=verifier(export),
        )
        # Without it speculators computes with uninitialised memory (c05b95b looks for NaN there).
        arrays = _arrays(export, _SPECULATORS) | {EMBEDDING_COPY: export.embedding()}
        export.write(out, "model.safetensors", arrays, config)


def unstorable(heads: HeadsConfig, llama: LlamaConfig | None) -> str:
    """The reason why no layout of EAGLE-3 can hold such heads; "" if one can."""
    assert isinstance(heads, Eagle3Config)
    if heads.lm_head == "low_rank":
        return "EAGLE-3 files cannot store low-rank LM heads"
    return out_of_order(heads, llama)


def _locate(path: str, stem: str) -> tuple[str, bool]:
    """A path of `heads/eagle3.py` -> (key, whether it is stored transposed)."""
    key, transposed = locate_in_layers(path)
    key = re.sub(r"^fc_norms_(\d+)\.", r"fc_norm.\1.", key.replace(_SPECULATORS, stem))
    return key, transposed


def _depth(file: str, ids: Any) -> dict[str, int]:
    """The backbone's number of layers, which follows from the numbers of the tapped layers, if a file has them.

    Files number a stream by the layer that it enters (2, L / 2, L - 3) or by the layer that it leaves (one less).
    Other numbers are ambiguous.
    """
    if not ids:
        return {}
    numbers = isinstance(ids, list) and len(ids) == 3 and all(type(i) is int for i in ids)
    for at_exit in (0, 1) if numbers else ():
        L = ids[2] + 3 + at_exit
        if ids == [2 - at_exit, L // 2 - at_exit, L - 3 - at_exit]:
            return {"n_layers": L}
    raise UserError(
        f"{file}: {TAPS} {ids!r} are not the layers of the paper, and "
        "whether they are entered or left is not stated"
    )


def _arrays(export: Export, stem: str) -> Arrays:
    added = vocabulary_arrays(export) | shared_lm_head(export)
    return export.arrays(partial(_locate, stem=stem)) | added


def _config(export: Export, drafter: TappedDrafter) -> tuple[Json, Json]:
    """config.json of the layers, and the fields that EAGLE-3 adds."""
    heads, vocab_size = drafter.heads, export.base.config.vocab_size
    layers = replace(drafter.shape, n_layers=heads.n_layers, tie_embeddings=False)
    return config_to_hf(layers), {
        "draft_vocab_size": heads.draft_vocab or vocab_size,
        **{flag: True for flag in _FLAGS if getattr(heads, flag)},
    }
