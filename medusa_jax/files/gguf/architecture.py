"""Translate GGUF metadata and tensor names to Hugging Face's."""

import math
import re
from typing import Any

import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.files.families import FAMILIES as BY_MODEL_TYPE
from medusa_jax.files.gguf.reader import BlockTensor, GGUFFile, read_gguf
from medusa_jax.files.hf_config import LAYER_KINDS
from medusa_jax.files.stored_forms import from_neighbours, reordered, with_offset
from medusa_jax.files.tensor import Tensor, Tensors
from medusa_jax.model.blocks import Blocks

# general.architecture -> model_type. MiniCPM's metadata is Granite's.
_SAME = ("llama", "qwen2", "qwen3", "smollm3", "granite", "phi3", "olmo2", "exaone")
FAMILIES = dict(zip(_SAME, _SAME)) | {"minicpm": "granite", "gemma3": "gemma3_text"}
FAMILIES |= {"gemma": "gemma", "glm4": "glm4", "hunyuan-dense": "hunyuan_v1_dense"}
# The same for files with a window.
WINDOWED = {"llama": "mistral", "olmo2": "olmo3"}
# Architectures whose rows of queries and keys llama.cpp reorders: it rotates neighbours (2i, 2i + 1).
REORDERED = ("llama", "smollm3", "granite", "minicpm")
# Numbers of some families -> fields of config.json.
NUMBERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
    "rope.freq_base_swa": "rope_local_base_freq",
}

# Fields and their supported values; with others llama.cpp computes something else. A cap of 0 is none.
EXPECTED = {
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "expert_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.dimension_sections": ([0] * 4,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
# Further sizes of heads, which are all of one size here.
HEAD_SIZES = ("value_length", "key_length_swa", "value_length_swa")

# GGUF's name of a module -> Hugging Face's, outside of the layers and in them.
MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "self_attn.qkv_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# A number that multiplies a module's output; llama.cpp reads `.input_scale`, but does not use it.
SCALE = re.compile(
    r"(blk\.\d+\.(?:attn_(?:q|k|v|output)|ffn_(?:gate|up|down)))\.(input_)?scale"
)

# Where an architecture's names in layers differ.
RENAMED = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm"},
    "glm4": {
        "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
}  # fmt: skip

# LongRoPE's divisors for texts within the original context, and for longer ones.
LONGROPE = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("short", "long")}
# Llama 3.1's scaling of the rotary frequencies, stored as a divisor for each frequency.
FREQUENCY_DIVISORS = "rope_freqs.weight"
LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """`config.json` of the model, without token ids.

    Raises:
      UserError: an unsupported architecture or feature; a count is missing or contradicts others.
    """
    arch = file.text("general.architecture")
    if arch not in FAMILIES:
        raise UserError(
            f"{file.file}: architecture {arch!r} is not supported (there are: "
            f"{', '.join(FAMILIES)})"
        )
    width = file.count(f"{arch}.embedding_length")
    layers = file.count(f"{arch}.block_count")
    heads = file.per_layer(f"{arch}.attention.head_count", layers)
    head_dim = file.count(f"{arch}.attention.key_length", width // heads)
    rotated = file.count(f"{arch}.rope.dimension_count", head_dim)
    sizes = {f"attention.{name}": (head_dim,) for name in HEAD_SIZES}
    expected: dict[str, tuple] = EXPECTED | sizes | {"rope.dimension_count_swa": (rotated,)}
    if arch == "granite":  # otherwise no layer rotates
        expected["rope.scaling.finetuned"] = (True,)
    if arch == "hunyuan-dense":  # llama.cpp takes one expert as none
        expected |= {"expert_count": (0, 1), "rope.scaling.alpha": (0.0,)}
    file.expect({f"{arch}.{name}": values for name, values in expected.items()})
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.file} is damaged: it has no tensor 'token_embd.weight'")
    window = file.whole(f"{arch}.attention.sliding_window", 0) or None
    config: dict[str, Any] = {
        "model_type": (WINDOWED if window else FAMILIES).get(arch, FAMILIES[arch]),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": file.per_layer(f"{arch}.feed_forward_length", layers),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.per_layer(
            f"{arch}.attention.head_count_kv", layers, heads
        ),
        "head_dim": head_dim,
        "max_position_embeddings": file.count(f"{arch}.context_length"),
        "rms_norm_eps": file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": file.number(f"{arch}.rope.freq_base", 10000.0),
        "sliding_window": window,
        "partial_rotary_factor": rotated / head_dim,
    }
    name = f"{arch}.attention.sliding_window_pattern"
    if window and name in file.values:
        windows = file.values[name]
        if not isinstance(windows, list):
            period = file.whole(name) or layers + 1  # 0: no layer is without the window
            windows = [(i + 1) % period for i in range(layers)]
        config["layer_types"] = [LAYER_KINDS[bool(one)] for one in windows]
    config["rope_scaling"] = rope = _rope_scaling(file, arch, config)
    # llama.cpp's values where a file does not say them.
    plain = {"attention_multiplier": head_dim**-0.5}
    largest = arch == "gemma3" and layers == 62
    usual: dict[str, dict[str, Any]] = {
        "granite": plain,
        "minicpm": plain | {
            "embedding_multiplier": 12.0, "residual_multiplier": 1.4 / layers**0.5, "logits_scaling": width / 256,
        },
        "olmo2": {"rope_parameters": {LAYER_KINDS[True]: {"rope_theta": config["rope_theta"]}} if window else None},
        "phi3": {"original_max_position_embeddings": (rope or {}).get("original_max_position_embeddings")},
        "gemma3": {"query_pre_attn_scalar": width / heads if largest else head_dim},
    }  # fmt: skip
    config |= usual.get(arch, {})
    for theirs, ours in NUMBERS.items():
        if (name := f"{arch}.{theirs}") in file.values:
            config[ours] = file.number(name)
    if arch != "qwen2":
        names = " ".join(file.tensors)
        config["attention_bias"] = bool(re.search(r"\battn_\w+\.bias", names))
        config["mlp_bias"] = bool(re.search(r"\bffn_\w+\.bias", names))
    return config


def _rope_scaling(file: GGUFFile, arch: str, config: dict[str, Any]) -> dict | None:
    """`rope_scaling` of config.json."""
    key = f"{arch}.rope.scaling."
    names = [n for n in (f"{key}factor", f"{arch}.rope.scale_linear") if n in file.values]
    # As in llama.cpp a factor without a type is linear, and 0 is none.
    factor = file.number(names[0]) if names and file.values[names[0]] else 1.0
    kind = file.text(f"{key}type", "linear")
    kind = "none" if kind == "linear" and factor == 1 else kind
    divisors = file.tensors.get(FREQUENCY_DIVISORS)
    original = file.whole(
        f"{key}original_context_length", config["max_position_embeddings"]
    )
    scaling: dict[str, Any] = {"original_max_position_embeddings": original}
    if all(name in file.tensors for name in LONGROPE.values()):
        lists = {n: file.tensors[x].unpacked().tolist() for n, x in LONGROPE.items()}
        factor_of_both = file.values.get(f"{key}attn_factor")
        return (
            scaling | lists | {"rope_type": "longrope", "attention_factor": factor_of_both}
        )
    known = ("none", "linear") if arch == "phi3" else ("none", "linear", "yarn")
    if kind not in known or (divisors and kind != "none"):
        raise UserError(f"{file.file}: rope scaling {kind!r} is not supported here")
    file.expect({f"{key}attn_factor": (1.0,)})
    if divisors is not None:
        return _llama3_scaling(divisors, config)
    if kind != "yarn":
        return {"rope_type": "linear", "factor": factor} if kind == "linear" else None
    scaling |= {"rope_type": "yarn", "factor": factor}
    for name in ("beta_fast", "beta_slow"):
        scaling[name] = file.values.get(f"{key}yarn_{name}")
    return scaling | {"attention_factor": file.values.get(f"{key}yarn_attn_factor")}


def _llama3_scaling(divisors: BlockTensor, config: dict[str, Any]) -> dict[str, Any]:
    """The scaling with these divisors.

    With factor s, low and high frequency factors l, h, and c = original context / wavelength, a divisor is 1 for
    c > h, s for c < l, and 1 / ((1 - m) / s + m) with m = (c - l) / (h - l) between them.
    """
    unsupported = UserError(
        f"{divisors.file}: the rotary frequencies in {FREQUENCY_DIVISORS} are scaled in a way that "
        "is not supported (only Llama 3's is)"
    )
    if divisors.shape != (config["head_dim"] // 2,):
        raise unsupported
    values = divisors.unpacked()
    factor = float(values.max())
    low, high, context = LLAMA3_SCALING.values()
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    c = context / (2 * math.pi * config["rope_theta"] ** exponents)
    m = np.clip((c - low) / (high - low), 0.0, 1.0)
    formula = 1 / ((1 - m) / factor + m)
    if not np.allclose(values, formula, rtol=1e-3):
        raise unsupported
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_SCALING}


def hf_name(name: str, arch: str) -> str:
    """The Hugging Face name of a tensor; unknown names are unchanged.

    Example: "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight".
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    i, module, leaf = match.groups() if match else (None, "", "")
    in_layers = IN_LAYERS | RENAMED.get(arch, {})
    stem = MODULES.get(module) if i is None else in_layers.get(module)
    if stem is None:
        return name
    return f"{stem}.{leaf}" if i is None else f"model.layers.{i}.{stem}.{leaf}"


def open_gguf(path: str) -> Tensors:
    """The tensors of a GGUF file by their Hugging Face names; they are read later.

    Raises:
      UserError: as for `hf_config`.
    """
    file = read_gguf(path)
    return hf_tensors(file, hf_config(file))


def hf_tensors(file: GGUFFile, config: dict[str, Any]) -> Tensors:
    """`open_gguf` of an open file with this `hf_config`."""
    left_out = (FREQUENCY_DIVISORS, *LONGROPE.values())
    arch = file.text("general.architecture")
    scales = {
        name: match
        for name, tensor in file.tensors.items()
        if (match := SCALE.fullmatch(name)) and tensor.shape == (1,)
    }
    factors = {m[1]: file.tensors[n].unpacked() for n, m in scales.items() if not m[2]}
    tensors: Tensors = {}
    for name, tensor in file.tensors.items():
        if name in left_out or name in scales:
            continue
        module, _, leaf = name.rpartition(".")
        # llama.cpp adds the bias after the factor in attention, before it in the MLP.
        factor = factors.get(module) if leaf == "weight" or ".ffn_" in name else None
        opened = _open_tensor(tensor, factor, exact=not factors)
        tensors[hf_name(name, arch)] = opened
    if arch in REORDERED:
        tensors = reordered(tensors, from_neighbours(config["head_dim"]))
    tensors = _zero_biases(tensors, config) | tensors
    return with_offset(tensors, -BY_MODEL_TYPE[config["model_type"]].norm_offset)


def _zero_biases(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Zeros for all biases that the configuration has; llama.cpp takes a file with some of them."""
    parts = []
    if config["model_type"] == "qwen2" or config["attention_bias"]:
        parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    read = BY_MODEL_TYPE[config["model_type"]].reads.get("attention_bias", ())
    has_out_bias = "out_bias" in read and config.get("attention_bias")
    parts += ["self_attn.o_proj"] if has_out_bias else []
    parts += ["mlp"] if config.get("mlp_bias") else []
    zeros = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") and any(f".{part}" in name for part in parts):
            bias = np.zeros(tensor.shape[0], np.float32)
            key = f"{name.removesuffix('weight')}bias"
            zeros[key] = Tensor(tensor.file, bias.shape, "float32", bias.__getitem__)
    return zeros


def _open_tensor(
    tensor: BlockTensor, factor: np.ndarray | None = None, exact: bool = True
) -> Tensor:
    """Open a tensor times a factor [1]; `exact` as in `Blocks`."""

    def unpacked(rows: Any) -> np.ndarray:
        values = tensor.unpacked_rows(rows)
        return values if factor is None else values * factor

    def read(index: tuple[slice, ...]) -> np.ndarray:
        if len(tensor.shape) > 1:
            return unpacked(index[0])[:, index[1]]
        return tensor.unpacked()[index] * (1 if factor is None else factor)

    blocks = Blocks(tensor.kind.name, tensor.shape[-1], tensor.read, unpacked, exact)
    return Tensor(tensor.file, tensor.shape, "float32", read, blocks, tensor.name)
