"""Read a backbone's `config.json`; refuses unsupported features."""

import math
import os
from dataclasses import fields, replace
from typing import Any, get_type_hints

from medusa_jax.arch import LlamaConfig
from medusa_jax.errors import UserError, one_of
from medusa_jax.files.families import ACTIVATIONS, FAMILIES, FIELDS, Family, text_config
from medusa_jax.files.json_files import read_json
from medusa_jax.typed import Fields, read
from medusa_jax.whole_files import Json

# Fields and their supported values; with others transformers computes something else, or reads another file.
EXPECTED = {
    "hidden_act": tuple(ACTIVATIONS),
    "is_causal": (True,),
    "per_layer_config": ({},),
    "configuration_files": (["config.json"], []),
    "transformers_weights": ("model.safetensors", "model.safetensors.index.json"),
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
    "longrope": _ORIGINAL | {"attention_factor": "rope_attention_factor"},
}
# LongRoPE's lists of divisors.
DIVISORS = {"short_factor": "rope_short", "long_factor": "rope_long"}
# Kinds of layers in layer_types: without and with the window.
LAYER_KINDS = "full_attention", "sliding_attention"
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
    if not os.path.exists(file) and os.path.exists(os.path.join(path, "heads.json")):
        raise UserError(f"{path} holds draft heads, not a model: give it to --drafter")
    if "workdir" in (raw := read_json(file)) and "model_type" not in raw:
        raise UserError(f"{path} is a training's work directory: use its export/")
    return parse_config(file, raw)


def family_of(file: str, raw: Json) -> Family:
    """The family of a config.json."""
    model_type = text_config(raw).get("model_type", "")
    one_of(f"{file}: a supported model_type", model_type, FAMILIES)
    return FAMILIES[model_type]


def parse_config(file: str, raw: Json) -> LlamaConfig:
    """The backbone's shape from the fields of a config.json; `file` is named in errors."""
    family, raw = family_of(file, raw), text_config(raw)
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"{file}: quantization_config ({method}) is not supported; use the unquantised model"
        )
    raw = {name: value for name, value in raw.items() if name not in family.ignored}
    tables = {n: x for n, x in family.defaults.items() if isinstance(x, list | dict)}
    raw |= {n: x for n, x in tables.items() if raw.get(n) is None}
    named = {ours: theirs for theirs, ours in family.names.items() if theirs in raw}
    able = {**EXPECTED, **family.expected}
    said_or_usual = family.defaults | {
        n: value for n, value in raw.items() if value is not None
    }
    Fields(file, said_or_usual).expect({named.get(n, n): x for n, x in able.items()})
    raw |= {ours: raw[theirs] for ours, theirs in named.items()}
    # An explicit null means "derive it", and for windows "none".
    usual = {"max_position_embeddings": family.context, "rms_norm_eps": 1e-6}
    values = usual | family.defaults | raw
    fields = Fields(file, {name: v for name, v in values.items() if v is not None})
    heads = fields.count("num_attention_heads")
    fields.values.setdefault("num_key_value_heads", heads)
    fields.values.setdefault("head_dim", fields.count("hidden_size") // heads)
    reads = {**{name: (ours,) for name, ours in FIELDS.items()}, **family.reads}
    said: Json = {
        ours: _value(fields, name, ours) for name in reads for ours in reads[name]
    }
    said["activation"] = ACTIVATIONS.get(fields.text("hidden_act", "silu"))
    config = LlamaConfig(
        **said | family.shape | family.derived(fields),
        **_layers(family, fields),
        **_rope(file, family, fields.values, said["head_dim"]),
    )
    return _consistent(file, config)


def _value(fields: Fields, name: str, ours: str) -> bool | int | float:
    """A field of config.json, of the type that ours has."""
    kind = get_type_hints(LlamaConfig)[ours]
    if kind is bool:
        return fields.switch(name)
    return fields.count(name) if kind is int else fields.number(name, 1.0)


def check_like_llama(file: str, layers: LlamaConfig) -> None:
    """Refuse draft heads whose layers, as their file describes them, are unlike Llama's.

    Raises:
      UserError: they are, or have a window.
    """
    if window := layers.sliding_window:
        raise UserError(
            f"{file}: draft heads with a window (sliding_window {window}) are not supported"
        )
    if layers != layers.llama_layers():
        raise UserError(f"{file}: draft heads with layers unlike Llama's are not supported")


def _consistent(file: str, config: LlamaConfig) -> LlamaConfig:
    """Set the context that the rotation reaches, and reset fields that change nothing.

    Raises:
      UserError: sizes do not fit together.
    """
    original, changed = config.rope_original_max_position, Json()
    if config.rope_scaling == "yarn":  # Qwen's files keep the original context
        context = min(config.rope_factor * original, 2**31 - 1)
        changed["max_position"] = max(config.max_position, int(context))
    if config.rope_scaling == "longrope" or config.query_growth:
        changed["max_position"] = min(config.max_position, original)
    if config.attention_multiplier == config.head_dim**-0.5:
        changed["attention_multiplier"] = 0.0
    same_base = config.rope_window_theta == config.rope_theta
    if not config.sliding_window or (same_base and config.rope_scaling == "none"):
        changed["rope_window_theta"] = 0.0
    config = replace(config, **changed)
    if problem := contradiction(config):
        raise UserError(f"{file}: {problem}")
    return config


def contradiction(config: LlamaConfig) -> str:
    """What does not fit together in a shape, "" if all does."""
    rotated, n = config.rope_dim or config.head_dim, config.n_layers
    if config.n_heads % config.n_kv_heads or config.head_dim % 2:
        return (
            f"{config.n_heads} query heads, {config.n_kv_heads} key/value heads and head "
            f"size {config.head_dim} do not fit together"
        )
    if rotated % 2 or rotated > config.head_dim:
        return f"rope_dim {rotated} is not an even number up to head_dim {config.head_dim}"
    for name in ("rotated_layers", "window_layers"):
        if (found := len(getattr(config, name))) not in (0, n):
            return f"{name} is for {found} layers, not for n_layers {n}"
    if config.rope_scaling == "yarn" and config.rope_theta <= 1:
        return "rope_theta should be above 1 for yarn"
    if config.rope_scaling == "longrope":
        for theirs, ours in DIVISORS.items():
            above0 = [divisor > 0 for divisor in getattr(config, ours)]
            if above0 != [True] * (rotated // 2):
                wanted = f"{rotated // 2} numbers above 0"
                return f"longrope needs {wanted} in {ours} ({theirs} in files)"
    return ""


def _layers(family: Family, fields: Fields) -> Json:
    """The window, the layers that have it, and the layers that rotate queries and keys."""
    n = fields.count("num_hidden_layers")
    windows, rotated = window_layers(family, fields, n), (True,) * n
    if family.rotates == "window" and "sliding_window" in fields.values:
        rotated = windows
    if family.rotates == "listed":
        period = fields.count("no_rope_layer_interval", 4)
        usual = [int((i + 1) % period > 0) for i in range(n)]
        listed = fields.items("no_rope_layers", int, []) or usual  # 1: it rotates
        if len(listed) < n or not {0, 1} >= set(listed):
            fields.refuse("no_rope_layers", f"a list of {n} zeros and ones")
        rotated = tuple(bool(one) for one in listed[:n])
    return {
        "sliding_window": fields.count("sliding_window") if any(windows) else 0,
        "window_layers": windows if any(windows) and not all(windows) else (),
        "rotated_layers": () if all(rotated) else rotated,
    }


def window_layers(family: Family, fields: Fields, n: int) -> tuple[bool, ...]:
    """Whether each layer has the window.

    Raises:
      UserError: a kind of layer that is not supported.
    """
    older = {"attention": LAYER_KINDS[0]}  # Granite 4's files
    kinds = [older.get(kind, kind) for kind in fields.items("layer_types", str, [])]
    supported = LAYER_KINDS if family.windows else LAYER_KINDS[:1]
    for kind in kinds:
        one_of(f"{fields.file}: a supported kind in layer_types", kind, supported)
    late = family.windows == "late"
    window = family.windows and fields.count("sliding_window", 0, least=0)
    is_off = not window or (late and not fields.switch("use_sliding_window"))
    if kinds:
        if len(kinds) != n:
            fields.refuse("layer_types", f"a list of {n} kinds")
        if is_off and LAYER_KINDS[1] in kinds:
            fields.refuse(
                "layer_types", f"{LAYER_KINDS[0]} for every layer without a window"
            )
        return tuple(kind == LAYER_KINDS[1] for kind in kinds)
    if is_off:
        return (False,) * n
    if family.windows == "fourth":
        return tuple(i % 4 > 0 for i in range(n))
    start = fields.count("max_window_layers", 28, least=0) if late else 0
    period = fields.count("sliding_window_pattern") if family.windows == "period" else n + 1
    return tuple(i >= start and (i + 1) % period > 0 for i in range(n))


def _rope(file: str, family: Family, raw: Json, head_dim: int) -> Json:
    """Fields of the rotary embedding.

    Up to transformers 4 they are `rope_theta` and `rope_scaling`; from 5 on `rope_parameters` has both, for some
    families by kind of layer. If a file has the old and the new fields, `rope_scaling` wins, as in transformers: it
    replaces `rope_parameters`, or is merged into their entry for layers without a window.
    """
    tables = Fields(file, raw)
    rope = tables.table("rope_scaling") or tables.table("rope_parameters")
    fields: Json = {}
    if family.window_theta:
        by_kind = Fields(file, tables.table("rope_parameters"))
        if not by_kind.values.keys() <= {*LAYER_KINDS}:  # transformers ignores others
            tables.refuse("rope_parameters", f"tables of {' and '.join(LAYER_KINDS)}")
        local = Fields(file, by_kind.table(LAYER_KINDS[1]))
        name = f"{LAYER_KINDS[1]}'s rope_type"
        Fields(file, {name: _kind(local.values)}).expect({name: ("default",)})
        theta = raw.get("rope_local_base_freq") or family.window_theta
        fields["rope_window_theta"] = local.number("rope_theta", theta)
        scaling = tables.table("rope_scaling")
        if "type" in scaling and "rope_type" not in scaling:
            # transformers 4 reads this spelling, 5 ignores it.
            tables.refuse("rope_scaling", "a table with rope_type")
        rope = by_kind.table(LAYER_KINDS[0]) | scaling
    kind = "longrope" if (kind := _kind(rope)) in family.longrope else kind
    outer = {name: raw.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    values = {n: value for n, value in (outer | rope).items() if value is not None}
    inner = Fields(file, values)
    fields["rope_theta"] = inner.number("rope_theta", 10000.0)
    if family.alpha and kind == "dynamic" and "alpha" in values:
        stretch = inner.number("alpha") ** (head_dim / (head_dim - 2))
        kind, fields["rope_theta"] = "default", fields["rope_theta"] * stretch
    if (share := inner.number("partial_rotary_factor", 1.0)) != 1:
        if not family.partial or not 2 / head_dim <= share < 1:
            raise UserError(f"{file}: partial_rotary_factor {share} is not supported")
        # Of a number of channels over `head_dim`, the product may be just below that number.
        fields["rope_dim"] = int(head_dim * share + 1e-9)
    if any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{file}: rope parameters that differ by layer are not supported")
    if kind == "default":
        return fields
    one_of(f"{file}: a supported rope type", kind, ("default", *SCALINGS))
    names = SCALINGS[kind]
    if "original_max_position_embeddings" in names:
        name = "original_max_position_embeddings"
        contexts = (raw.get(name), values.get(name), raw.get("max_position_embeddings"))
        values[name] = next((n for n in contexts if n is not None), None)
    if kind == "yarn":
        if "factor" in rope:  # null
            context = tables.count("max_position_embeddings")
            values.setdefault("factor", context / inner.number(name))
        _yarn_defaults(inner)
        fields["rope_truncate"] = inner.switch("truncate", True)
    if kind == "longrope":
        original, context = inner.number(name), tables.count("max_position_embeddings")
        if original <= 1:
            inner.refuse(name, "a number above 1")
        stated = inner.number("factor", context / original)
        values["factor"] = context / original
        log = math.log(stated) / math.log(original) if stated > 1 else 0.0
        values.setdefault("attention_factor", math.sqrt(1 + log))
        for theirs, ours in DIVISORS.items():
            fields[ours] = read(f"{file}: {theirs}", values.get(theirs), tuple[float, ...])
    fields |= {ours: inner.number(theirs) for theirs, ours in names.items()}
    if "rope_original_max_position" in fields:
        fields["rope_original_max_position"] = int(fields["rope_original_max_position"])
    return fields | {"rope_scaling": kind}


def _kind(rope: Json) -> Any:
    """The kind of a table of rope parameters, also in the older spelling."""
    return rope.get("rope_type", rope.get("type", "default"))


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
