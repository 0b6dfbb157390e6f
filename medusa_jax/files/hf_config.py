"""Read a backbone's `config.json`; refuses unsupported features."""

import math
import os
from dataclasses import fields

from medusa_jax.arch import LlamaConfig
from medusa_jax.errors import UserError, one_of
from medusa_jax.files.json_files import read_json
from medusa_jax.typed import Fields
from medusa_jax.whole_files import Json

# model_type -> defaults of absent fields (from its transformers class).
FAMILIES: dict[str, Json] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}
# Values without which transformers computes something else, or from another file.
EXPECTED = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    "transformers_weights": ("model.safetensors", "model.safetensors.index.json"),
}
# Sizes: field of config.json -> of LlamaConfig.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
}
# rope_type -> its numbers, theirs -> ours.
_FACTOR = {"factor": "rope_factor"}
_ORIGINAL = _FACTOR | {"original_max_position_embeddings": "rope_original_max_position"}
_LOW, _HIGH = "rope_low_freq_factor", "rope_high_freq_factor"
_YARN = {"beta_slow": _LOW, "beta_fast": _HIGH, "attention_factor": "rope_attention_factor"}
SCALINGS = {
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "llama3": _ORIGINAL | {"low_freq_factor": _LOW, "high_freq_factor": _HIGH},
    "yarn": _ORIGINAL | _YARN,
}
# Fields that determine the rotation.
ROPE = tuple(f.name for f in fields(LlamaConfig) if f.name.startswith("rope_"))


def read_config(path: str) -> LlamaConfig:
    """Read the backbone's shape from `config.json` in a local directory.

    Raises:
      UserError: no such file, or an unsupported feature.
    """
    file = os.path.join(path, "config.json")
    if os.path.exists(os.path.join(path, "adapter_config.json")):
        what = "has" if os.path.exists(file) else "is"
        raise UserError(
            f"{path} {what} an adapter (adapter_config.json), which transformers applies to the model: save the "
            "model that PEFT merges it into"
        )
    return parse_config(file, read_json(file))


def parse_config(file: str, raw: Json) -> LlamaConfig:
    """`read_config` of fields that were read from `file`."""
    family = raw.get("model_type", "")
    one_of(f"{file}: a supported model_type", family, FAMILIES)
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"{file}: quantization_config ({method}) is not supported; use the unquantised model"
        )
    Fields(file, raw).expect(EXPECTED)
    # An explicit null means "derive it", and for Mistral's window "none".
    values = FAMILIES[family] | raw
    fields = Fields(file, {name: v for name, v in values.items() if v is not None})
    heads = fields.count("num_attention_heads")
    derived = {
        "num_key_value_heads": heads,
        "head_dim": fields.count("hidden_size") // heads,
    }
    sizes: Json = {
        ours: fields.count(name, derived.get(name)) for name, ours in SIZES.items()
    }
    window = _sliding_window(file, family, raw, fields)
    attention_bias = fields.switch("attention_bias") and family in ("llama", "qwen3")
    config = LlamaConfig(
        **sizes,
        max_position=fields.count("max_position_embeddings"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.switch("tie_word_embeddings"),
        sliding_window=window[0],
        sliding_window_start_layer=window[1],
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        mlp_bias=fields.switch("mlp_bias") and family == "llama",
        qk_norm=family == "qwen3",
        **_rope(file, raw),
    )
    if config.rope_scaling == "yarn":  # Qwen's files keep the original context
        context = min(config.rope_factor * config.rope_original_max_position, 2**31 - 1)
        config.max_position = max(config.max_position, int(context))
    if config.n_heads % config.n_kv_heads or config.head_dim % 2:
        raise UserError(
            f"{file}: {config.n_heads} query heads, {config.n_kv_heads} key/value heads and head "
            f"size {config.head_dim} do not fit together"
        )
    return config


def _rope(file: str, raw: Json) -> Json:
    """Fields of the rotary embedding.

    Up to transformers 4 they are `rope_theta` and `rope_scaling`; from 5 on `rope_parameters` has both. If a file
    has the old and the new fields, `rope_scaling` wins, as in transformers.
    """
    tables = Fields(file, raw)
    rope = tables.table("rope_scaling") or tables.table("rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    values = {name: value for name, value in rope.items() if value is not None}
    inner = Fields(file, values if theta is None else values | {"rope_theta": theta})
    fields: Json = {"rope_theta": inner.number("rope_theta", 10000.0)}
    rotated = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotated not in (None, 1.0):
        raise UserError(f"{file}: partial_rotary_factor {rotated} is not supported")
    if any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{file}: rope parameters that differ by layer are not supported")
    if kind == "default":
        return fields
    one_of(f"{file}: a supported rope type", kind, ("default", *SCALINGS))
    names, values = SCALINGS[kind], inner.values
    if "original_max_position_embeddings" in names:
        name = "original_max_position_embeddings"
        contexts = (raw.get(name), values.get(name), raw.get("max_position_embeddings"))
        values[name] = next((n for n in contexts if n is not None), None)
    if kind == "yarn":
        if fields["rope_theta"] <= 1:
            raise UserError(f"{file}: rope_theta should be above 1 for yarn")
        _yarn_defaults(inner)
        fields["rope_truncate"] = inner.switch("truncate", True)
    fields |= {ours: inner.number(theirs) for theirs, ours in names.items()}
    if "rope_original_max_position" in fields:
        fields["rope_original_max_position"] = int(fields["rope_original_max_position"])
    return fields | {"rope_scaling": kind}


def _yarn_defaults(inner: Fields) -> None:
    """Add YaRN's absent numbers, as transformers computes them."""
    values, numbers = inner.values, {}
    for name, default in {"beta_fast": 32.0, "beta_slow": 1.0}.items():
        values[name] = values.get(name) or default
    for name in ("factor", "mscale", "mscale_all_dim"):
        numbers[name] = inner.number(name) if values.get(name) else 0.0
    factor, *scales = numbers.values()
    up, down = scales if all(scales) else (1.0, 0.0)
    if factor and values.get("attention_factor") is None:
        log = 0.1 * math.log(max(factor, 1.0))
        values["attention_factor"] = (up * log + 1.0) / (down * log + 1.0)


def _sliding_window(file: str, family: str, raw: Json, fields: Fields) -> tuple[int, int]:
    """(window, first layer that uses it); (0, 0) for full attention everywhere."""
    layers = fields.count("num_hidden_layers")
    if family == "llama":
        return 0, 0
    if family == "mistral":
        return fields.count("sliding_window", 0, least=0), 0
    if not fields.switch("use_sliding_window"):
        return 0, 0
    window = 0
    if raw.get("sliding_window", 4096) is not None:
        window = fields.count("sliding_window", 4096, least=0)
    start = fields.count("max_window_layers", 28, least=0)
    kinds = raw.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list):
            raise UserError(f"{file}: layer_types should be a list")
        start = next(
            (i for i, kind in enumerate(kinds) if kind == "sliding_attention"), layers
        )
        layout = ["full_attention"] * start + ["sliding_attention"] * (layers - start)
        if len(kinds) != layers or kinds != layout:
            raise UserError(
                f"{file}: layer_types is only supported as full_attention layers followed by "
                "sliding_attention layers"
            )
    return (window, start) if window and start < layers else (0, 0)
