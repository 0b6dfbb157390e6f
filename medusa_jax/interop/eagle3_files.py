"""EAGLE-3 heads as EAGLE's authors and SpecForge write them, told by their keys.

  midlayer.self_attn.{q,k,v}_proj.weight   [., 2 D]: embedding first; o_proj, mlp.* as in a Llama model
  midlayer.{hidden_norm,input_layernorm,post_attention_layernorm}.weight, norm.weight
  fc.weight                                [D, 3 D]: the lowest stream first; fc_norm.{a}.weight (3.1)
  lm_head.weight                           [O, D], O tokens
  d2t [O] int64, t2d [V] bool              token id - place among the O; which of V tokens they are
  embed_tokens.weight                      a copy of the backbone's, not read

`model.safetensors` or `pytorch_model.bin`, next to a `config.json` of the layer: its sizes, its
rotation (without `rope_theta` 10,000 and not the backbone's) and 3.1's flags. Engines drop flags that
they do not know; here an unknown one is refused.
"""

import os
import re
from dataclasses import replace

import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.heads.eagle3 import Eagle3, Eagle3Config
from medusa_jax.interop.hf import HARMLESS, read_config
from medusa_jax.interop.hf import locate as locate_in_llama
from medusa_jax.interop.hf_config import config_to_hf
from medusa_jax.interop.stored_heads import Export, StoredHeads
from medusa_jax.interop.tensor import Tensors, whole
from medusa_jax.whole_files import Json

EMBEDDING, D2T, T2D = "embed_tokens.weight", "d2t", "t2d"
LAYER = "midlayer"
# How speculators calls the layer; its config.json has another form.
SPECULATORS = "layers.0"

# Fields of config.json that are read here or by `read_config`.
READ = {
    "model_type", "hidden_act", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta",
    "rope_scaling", "rope_parameters", "vocab_size", "draft_vocab_size", "max_position_embeddings",
    "target_hidden_size", "eagle_config", "fc_norm", "norm_output", "norm_before_residual",
    "norm_before_fc", "attention_bias", "mlp_bias", "use_sliding_window",
}  # fmt: skip
# Fields that change nothing: a Llama layer over the whole text has no use for them.
UNUSED = {
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bias", "bos_token_id", "dtype",
    "eos_token_id", "initializer_range", "layer_types", "max_window_layers", "pad_token_id",
    "pretraining_tp", "sliding_window", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
# What another value of a field would change.
EXPECTED = {
    "num_hidden_layers": 1, "norm_before_fc": False, "attention_bias": False, "mlp_bias": False,
    "use_sliding_window": False,
}  # fmt: skip
ROPE = (
    "rope_theta",
    "rope_scaling",
    "rope_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_max_position",
)


def is_eagle3(tensors: Tensors) -> bool:
    """Whether a file holds EAGLE-3 heads."""
    stems = (LAYER, SPECULATORS)
    return "fc.weight" in tensors and any(
        f"{s}.hidden_norm.weight" in tensors for s in stems
    )


def open_eagle3(source: str, directory: str, tensors: Tensors, config: Json) -> StoredHeads:
    """Describe the EAGLE-3 heads of a file.

    Args: as for `open_medusa`.

    Raises:
      UserError: fields that are unknown or say what is not supported, a vocabulary that contradicts
        itself, a directory of speculators.
    """
    file = os.path.join(directory, "config.json")
    if "speculators_model_type" in config or f"{LAYER}.hidden_norm.weight" not in tensors:
        raise UserError(
            f"{directory} is in the layout of speculators, which is not supported; EAGLE's and "
            "SpecForge's are"
        )
    _check_fields(file, config)
    said = read_config(directory)
    expected = config.get("target_hidden_size", said.d_model)
    if expected != said.d_model:
        raise UserError(
            f"{file}: target_hidden_size {expected} with hidden_size {said.d_model} is not supported"
        )
    layers = {"d_model": said.d_model, "rms_eps": said.rms_eps} | _depth(file, config)
    theta = said.rope_theta
    if said.rope_scaling != "none":  # then it has to be the backbone's
        layers, theta = layers | {name: getattr(said, name) for name in ROPE}, 0.0
    ids = _take_ids(source, tensors, said.vocab_size)
    outputs = said.vocab_size if ids is None else len(ids)
    if (told := config.get("draft_vocab_size") or said.vocab_size) != outputs:
        raise UserError(f"{file}: draft_vocab_size {told!r}, {source} has {outputs} tokens")
    heads = Eagle3Config(
        draft_vocab=0 if ids is None else len(ids),
        fc_norm=config.get("fc_norm", False),
        norm_output=config.get("norm_output", False),
        norm_before_residual=config.get("norm_before_residual", False),
        attention_heads=said.n_heads,
        kv_heads=said.n_kv_heads,
        head_dim=said.head_dim,
        d_ff=said.d_ff,
        rope_theta=theta,
    )

    def ignore(key: str) -> bool:
        return key == EMBEDDING or bool(HARMLESS.search(key))

    return StoredHeads(
        source, directory, "EAGLE-3 heads", heads, tensors, locate, ignore, meta=config,
        layers=layers, ids=ids,
    )  # fmt: skip


def locate(path: str) -> tuple[str, bool]:
    """A path of `heads/eagle3.py` -> (key, whether it is stored transposed)."""
    key, transposed = locate_in_llama(path.removeprefix("heads_0/"))
    key = key.removeprefix("model.").replace("layers.0.", f"{LAYER}.")
    return re.sub(r"^fc_norms_(\d+)\.", r"fc_norm.\1.", key), transposed


def _check_fields(file: str, config: Json) -> None:
    for name in sorted(config.keys() - READ - UNUSED):
        raise UserError(
            f"{file} has a field that EAGLE-3 heads are not known to have: {name!r}"
        )
    for name, value in EXPECTED.items():
        if config.get(name, value) != value:
            raise UserError(
                f"{file}: {name} {config[name]!r} is not supported (only {value!r})"
            )
    for name in ("fc_norm", "norm_output", "norm_before_residual"):
        if type(config.get(name, False)) is not bool:
            raise UserError(f"{file}: {name} should be true or false, not {config[name]!r}")


def _depth(file: str, config: Json) -> dict[str, int]:
    """The number of layers of the backbone that the numbers of the tapped layers tell, if any.

    Files name the layers that streams enter (2, L / 2, L - 3) or those that they leave (one less). Other
    numbers may be meant either way.
    """
    table = config.get("eagle_config") or {}
    if not isinstance(table, dict) or not table.get("use_aux_hidden_state", True):
        raise UserError(f"{file}: eagle_config {table!r} is not supported")
    unknown = table.keys() - {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"}
    for name in sorted(unknown):
        raise UserError(f"{file} has an unknown field {name!r} under eagle_config")
    ids = table.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return {}
    numbers = isinstance(ids, list) and len(ids) == 3 and all(type(i) is int for i in ids)
    for left in (0, 1) if numbers else ():
        L = ids[2] + 3 + left
        if ids == [2 - left, L // 2 - left, L - 3 - left]:
            return {"n_layers": L}
    raise UserError(
        f"{file}: eagle_aux_hidden_state_layer_ids {ids!r} are not the layers of the paper, and "
        "whether they are entered or left is not told"
    )


def _take_ids(source: str, tensors: Tensors, vocab_size: int) -> np.ndarray | None:
    """Takes the draft vocabulary out of the tensors of a file; it is no parameter."""
    offsets, member = tensors.pop(D2T, None), tensors.pop(T2D, None)
    if offsets is None and member is None:
        return None
    if offsets is None or member is None:
        raise UserError(f"{source} has only one of the keys {D2T!r} and {T2D!r}")
    offset_O, member_V = whole(offsets), whole(member)
    if offset_O.ndim != 1 or offset_O.dtype != np.int64:
        raise UserError(
            f"key {D2T!r} in {source} is {offset_O.dtype}{list(offset_O.shape)}"
        )
    ids = (np.arange(len(offset_O)) + offset_O).astype(np.int32)
    if member_V.shape != (vocab_size,) or not np.array_equal(np.flatnonzero(member_V), ids):
        raise UserError(f"keys {D2T!r} and {T2D!r} in {source} name different tokens")
    return None if len(ids) == vocab_size else ids


def to_eagle3(export: Export, out: str) -> None:
    """SpecForge's layout of EAGLE-3, which vLLM and SGLang read: `model.safetensors`."""
    stored, config = export.stored, export.base.config
    heads = stored.heads
    if not isinstance(heads, Eagle3Config) or heads.lm_head != "own" or heads.n_layers != 1:
        raise UserError(
            "EAGLE-3's layout is for eagle3 heads of one layer with an LM head of their own, "
            f"{stored.source} holds {heads.drafter} heads of {heads.n_layers} with LM head "
            f"{heads.lm_head!r}"
        )
    if heads.tap_layers:
        raise UserError(
            f"the heads in {stored.source} read layers {heads.tap_layers}: engines do not agree on "
            "how a file would say that; only the paper's layers can be written"
        )
    arrays = export.arrays(locate)
    if stored.ids is not None:
        ids = stored.ids.astype(np.int64)
        arrays[D2T] = ids - np.arange(len(ids))
        arrays[T2D] = np.isin(np.arange(config.vocab_size), ids)
    shape = Eagle3(heads, config).shape
    shape = replace(shape, n_layers=1, sliding_window=0, tie_embeddings=False)
    flags = ("fc_norm", "norm_output", "norm_before_residual")
    raw = config_to_hf(shape) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": heads.draft_vocab or config.vocab_size,
        "torch_dtype": export.kind.name,
        **{flag: True for flag in flags if getattr(heads, flag)},
    }
    export.write(out, "model.safetensors", arrays, raw)
