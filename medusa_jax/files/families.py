"""The families of models: what their config.json says of the shape, and how their tensors are stored; a row each."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from medusa_jax.files.json_files import optional_json
from medusa_jax.typed import Fields
from medusa_jax.whole_files import Json

# hidden_act -> `LlamaConfig.activation`.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}  # fmt: skip
# Fields of config.json that every family has -> of LlamaConfig.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position",
    "rms_norm_eps": "rms_eps",
    "tie_word_embeddings": "tie_embeddings",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models with one model_type.

    Attributes:
      context: max_position_embeddings, if a file does not say it.
      defaults: other fields that a file may leave out (from the family's transformers class).
      shape: what differs from Llama in all of them.
      reads: further fields -> those of `LlamaConfig` that they set: switches, and multipliers, which are 1 if absent.
      names: other names of fields -> Llama's; if a file has both, the other name's value counts.
      ignored: fields that are not read, since the family's transformers class does not read them.
      derived: fields of `LlamaConfig` that follow from others.
      windows: layers with the window if there are no layer_types: "" (the family has none), "all", "late" (from
        max_window_layers on), "period" (all but the last of n, n = sliding_window_pattern) or "fourth" (all but the
        first of four).
      window_theta: layers with the window rotate with this base; 0: with that of the others.
      rotates: layers that rotate: "all", "listed" (no_rope_layers) or "window" (those, if there is one).
      partial: partial_rotary_factor is read.
      longrope: other names of this rope type.
      alpha: this number of dynamic scaling stretches the base, for texts of any length.
      expected: values of fields that would change the computation.
      keys: names of modules in checkpoints -> Llama's, replaced in this order.
      fused: matrices that are stored as one: "self_attn.qkv_proj", "mlp.gate_up_proj".
      neighbours: components 2i and 2i + 1 of a head are rotated together, not i and i + half of the rotated ones.
      norm_offset: number to add to stored norm scales (Gemma stores scale - 1).
    """

    context: int
    defaults: Json = field(default_factory=dict)
    shape: Json = field(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    derived: Callable[[Fields], Json] = lambda fields: {}
    windows: str = ""
    window_theta: float = 0.0
    rotates: str = "all"
    partial: bool = False
    longrope: tuple[str, ...] = ("su",)
    alpha: bool = False
    expected: Mapping[str, tuple] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    fused: tuple[str, ...] = ()
    neighbours: bool = False
    norm_offset: float = 0.0


def _minicpm(fields: Fields) -> Json:
    """Granite's multipliers by other names."""
    width, layers = fields.count("hidden_size"), fields.count("num_hidden_layers")
    return {
        "embedding_multiplier": fields.number("scale_emb", 1.0),
        "residual_multiplier": fields.number("scale_depth", 1.0) / layers**0.5,
        "logit_divisor": width / fields.number("dim_model_base", 1.0),
    }


def _gemma(fields: Fields) -> Json:
    return {"embedding_multiplier": fields.count("hidden_size") ** 0.5}


def _gemma3(fields: Fields) -> Json:
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    return _gemma(fields) | {"attention_multiplier": scale}


def _ministral3(fields: Fields) -> Json:
    rope = fields.table("rope_scaling") or fields.table("rope_parameters")
    inner = Fields(fields.file, {"rope_type": rope.get("type", "default")} | rope)
    inner.expect({"rope_type": ("yarn",)})
    return {"query_growth": inner.number("llama_4_scaling_beta")}


_BIAS: dict[str, tuple[str, ...]] = {"attention_bias": ("qkv_bias", "out_bias")}
_BIASES = _BIAS | {"mlp_bias": ("mlp_bias",)}
_MULTIPLIERS: dict[str, tuple[str, ...]] = {
    "embedding_multiplier": ("embedding_multiplier",), "residual_multiplier": ("residual_multiplier",),
    "attention_multiplier": ("attention_multiplier",), "logits_scaling": ("logit_divisor",),
}  # fmt: skip
_AFTER = {"pre_norm": False, "post_norm": True, "qk_norm": True}
_TIED = {"tie_word_embeddings": True}
_EPS = {"rms_norm_eps": 1e-5}
_WINDOW = {"sliding_window": 4096}
_CWM_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_EXAONE_KEYS = {
    "transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "transformer.h": "model.layers",
    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.attention": "self_attn",
    "out_proj": "o_proj", "mlp.c_fc_0": "mlp.gate_proj", "mlp.c_fc_1": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
}  # fmt: skip
_GLM4_KEYS = {
    "post_attention_layernorm": "pre_feedforward_layernorm", "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}  # fmt: skip
_GLM: dict[str, Any] = {
    "defaults": {
        "rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True,
        "partial_rotary_factor": 0.5},
    "reads": {"attention_bias": ("qkv_bias",)}, "partial": True, "neighbours": True, "fused": ("mlp.gate_up_proj",),
}  # fmt: skip
_MISTRAL = Family(
    context=131072, defaults=_WINDOW | {"num_key_value_heads": 8}, windows="all"
)
# In the order in which they are tried for a shape that is written.
FAMILIES: dict[str, Family] = {
    "llama": Family(context=2048, reads=_BIASES),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": Family(
        context=262144, defaults=_EPS | {"num_key_value_heads": 8, "head_dim": 128}, ignored=("layer_types",),
        windows="all", derived=_ministral3),
    "cwm": Family(
        context=131072, defaults=_EPS | {
            "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192, "rope_theta": 1e6,
            "rope_parameters": _CWM_ROPE},
        reads={"mlp_bias": ("mlp_bias",)}, windows="fourth"),
    "qwen2": Family(
        context=32768, defaults=_WINDOW | {"num_key_value_heads": 32}, shape={"qkv_bias": True}, windows="late"),
    "qwen3": Family(
        context=32768, defaults=_WINDOW | {"num_key_value_heads": 32, "head_dim": 128}, shape={"qk_norm": True},
        reads=_BIAS, windows="late"),
    "smollm3": Family(
        context=32768, defaults=_TIED | {"num_key_value_heads": 4, "rope_theta": 2e6}, reads=_BIASES,
        rotates="listed", expected={"use_sliding_window": (False,)}),
    # Older files say "gelu" and mean the approximation.
    "gemma": Family(
        context=8192, defaults=_TIED | {"num_key_value_heads": 16, "head_dim": 256},
        shape={"activation": "gelu_tanh"}, reads=_BIAS, derived=_gemma,
        expected={"hidden_act": ("gelu_pytorch_tanh", "gelu"), "use_bidirectional_attention": (False,)},
        norm_offset=1.0),
    "granite": Family(context=2048, reads=_BIASES | _MULTIPLIERS),
    # Granite 4; layers are recurrent and have experts unless a file says otherwise.
    "granitemoehybrid": Family(
        context=2048, defaults={
            "layer_types": ["linear_attention"], "num_local_experts": 8, "position_embedding_type": "none",
            "intermediate_size": 1024},
        reads=_BIAS | _MULTIPLIERS, ignored=("intermediate_size",),
        names={"shared_intermediate_size": "intermediate_size", "layers_block_type": "layer_types"},
        expected={"num_local_experts": (0,), "position_embedding_type": ("rope",)}, fused=("mlp.gate_up_proj",),
        keys={"shared_mlp.input_linear": "mlp.gate_up_proj", "shared_mlp.output_linear": "mlp.down_proj"}),
    # Its code is in no release of transformers; these are the defaults of that code.
    "minicpm": Family(
        context=2048, defaults=_TIED, reads=_BIAS, expected={"sparse_config": (None,)}, derived=_minicpm),
    "phi3": Family(
        context=4096, defaults=_EPS | {"original_max_position_embeddings": 4096}, windows="all",
        ignored=("layer_types",), partial=True, longrope=("su", "yarn"), fused=("self_attn.qkv_proj", "mlp.gate_up_proj")),
    "glm": Family(context=131072, **_GLM),
    "glm4": Family(context=131072, shape={"post_norm": True}, keys=_GLM4_KEYS, **_GLM),
    "hunyuan_v1_dense": Family(
        context=2048, defaults=_EPS, shape={"qk_norm": True, "qk_norm_late": True}, reads=_BIAS, alpha=True,
        keys={"query_layernorm": "q_norm", "key_layernorm": "k_norm"}),
    "olmo2": Family(context=2048, defaults=_EPS, shape=_AFTER | {"qk_norm_full": True}, reads=_BIAS),
    "olmo3": Family(
        context=2048, defaults=_EPS | _WINDOW | {"rope_theta": 5e5, "sliding_window_pattern": 4},
        shape=_AFTER | {"qk_norm_full": True}, reads=_BIAS, ignored=("rope_local_base_freq", "sliding_window_pattern"),
        windows="period", window_theta=5e5),
    "exaone": Family(
        context=4096, defaults=_EPS | {"num_key_value_heads": 8, "rope_theta": 5e5}, reads=_BIASES,
        names={"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps",
               "activation_function": "hidden_act"}, keys=_EXAONE_KEYS),
    "exaone4": Family(
        context=2048, defaults=_EPS | _WINDOW | {"num_key_value_heads": 32, "sliding_window_pattern": 4},
        shape=_AFTER, windows="period", rotates="window"),
    "internlm3": Family(
        context=32768, defaults=_EPS | {"num_key_value_heads": 2, "head_dim": 128},
        reads={"attention_bias": ("qkv_bias",), "mlp_bias": ("out_bias", "mlp_bias")},
        names={"qkv_bias": "attention_bias", "bias": "mlp_bias"}),
    "iquestcoder": Family(
        context=131072, defaults=_EPS | {"num_key_value_heads": 8, "head_dim": 128}, reads=_BIASES,
        expected={"clip_qkv": (None,), "use_sliding_window": (False,)}),
    "helium": Family(
        context=4096, defaults={
            "rms_norm_eps": 1e-8, "num_key_value_heads": 20, "head_dim": 128, "rope_theta": 1e5},
        reads={"attention_bias": ("qkv_bias",), "mlp_bias": ("mlp_bias",)}, neighbours=True),
    "ernie4_5": Family(
        context=131072, defaults=_TIED | _EPS | {"num_key_value_heads": 2, "rope_theta": 5e5, "head_dim": 128},
        reads={"use_bias": ("qkv_bias", "out_bias", "mlp_bias")}, neighbours=True),
    "seed_oss": Family(
        context=524288, defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        reads=_BIASES | {"attention_bias": ("qkv_bias",), "attention_out_bias": ("out_bias",)}),
    "arcee": Family(
        context=4096, defaults=_EPS | {"hidden_act": "relu2"}, shape={"gated_mlp": False}, reads=_BIASES),
    "gemma3_text": Family(
        context=131072, defaults=_TIED | _WINDOW | {
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "rope_theta": 1e6, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256},
        shape={"post_norm": True, "qk_norm": True}, reads=_BIAS, names={"hidden_activation": "hidden_act"},
        ignored=("hidden_act",), windows="period", window_theta=1e4, derived=_gemma3,
        expected={"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
                  "use_bidirectional_attention": (False,)},
        norm_offset=1.0),
}  # fmt: skip
# Vision models -> the family of their language model, unless its table says another.
VISION = {"gemma3": "gemma3_text", "mistral3": "mistral", "exaone4_5": "exaone4"}
# Fields of a vision model that are about its language model or its files.
_OUTER = "tie_word_embeddings bos_token_id eos_token_id quantization_config configuration_files transformers_weights"


def model_fields(directory: str) -> Json:
    """`text_config` of a directory's config.json; {} without one."""
    return text_config(optional_json(os.path.join(directory, "config.json")))


def text_config(raw: Json) -> Json:
    """The fields of a config.json; for a vision model, those of its language model."""
    if (outer := raw.get("model_type")) not in [*VISION]:
        return raw
    table = raw.get("text_config")
    text = {"model_type": VISION[outer]} | (table if isinstance(table, dict) else {})
    if text["model_type"] == "exaone4_5_text":  # EXAONE 4.5's first files
        text["model_type"] = "exaone4"
    # Without a word the weights decide whether the LM head is tied.
    said = {name: raw[name] for name in _OUTER.split() if raw.get(name) is not None}
    return text | _TIED | said
