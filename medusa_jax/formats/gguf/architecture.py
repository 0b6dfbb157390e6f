"""Translate GGUF metadata and tensor names to Hugging Face's."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.formats.gguf.reader import BlockTensor, GGUFFile, read_gguf
from medusa_jax.interop.tensor import Tensor, Tensors
from medusa_jax.model.blocks import Blocks

# general.architecture -> model_type. Mistral's files say "llama".
FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# GGUF name -> (Hugging Face name, dimensions: V vocabulary, D width, F mlp width, H head size,
# Q all query heads, K all key heads).
OUTSIDE_LAYERS = {
    "token_embd.weight": ("model.embed_tokens.weight", "VD"),
    "output_norm.weight": ("model.norm.weight", "D"),
}
OUTPUT = {"output.weight": ("lm_head.weight", "VD")}
IN_LAYERS = {
    "attn_norm.weight": ("input_layernorm.weight", "D"),
    "attn_q.weight": ("self_attn.q_proj.weight", "QD"),
    "attn_k.weight": ("self_attn.k_proj.weight", "KD"),
    "attn_v.weight": ("self_attn.v_proj.weight", "KD"),
    "attn_output.weight": ("self_attn.o_proj.weight", "DQ"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "D"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "FD"),
    "ffn_up.weight": ("mlp.up_proj.weight", "FD"),
    "ffn_down.weight": ("mlp.down_proj.weight", "DF"),
}
QKV_BIAS = {
    "attn_q.bias": ("self_attn.q_proj.bias", "Q"),
    "attn_k.bias": ("self_attn.k_proj.bias", "K"),
    "attn_v.bias": ("self_attn.v_proj.bias", "K"),
}
OUT_BIAS = {"attn_output.bias": ("self_attn.o_proj.bias", "D")}
MLP_BIAS = {
    "ffn_gate.bias": ("mlp.gate_proj.bias", "F"),
    "ffn_up.bias": ("mlp.up_proj.bias", "F"),
    "ffn_down.bias": ("mlp.down_proj.bias", "D"),
}
QK_NORM = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "H"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "H"),
}

# Llama 3.1's scaling of the rotary frequencies, stored as a divisor for each frequency.
FREQUENCY_DIVISORS = "rope_freqs.weight"
# Further factors of llama.cpp, under `rope.scaling.`.
EXPECTED_SCALING = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
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
            f"{file.path}: architecture {arch!r} is not supported (there are: "
            f"{', '.join(FAMILIES)})"
        )
    if file.whole(f"{arch}.expert_count", 0):
        raise UserError(f"{file.path}: a mixture of experts is not supported")
    width = file.whole(f"{arch}.embedding_length")
    heads = file.whole(f"{arch}.attention.head_count")
    kv_heads = file.whole(f"{arch}.attention.head_count_kv", heads)
    if not heads or not kv_heads or heads % kv_heads:
        raise UserError(
            f"{file.path}: {heads} query heads and {kv_heads} key/value heads do not fit"
        )
    head_dim = file.whole(f"{arch}.attention.key_length", width // heads)
    value_dim = file.whole(f"{arch}.attention.value_length", head_dim)
    rotated = file.whole(f"{arch}.rope.dimension_count", head_dim)
    if not head_dim == value_dim == rotated or head_dim % 2:
        raise UserError(
            f"{file.path}: heads of {head_dim} keys and {value_dim} values, {rotated} of them "
            "rotated, are not supported: all three must be equal and even"
        )
    embedding = file.tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [f"{FAMILIES[arch].capitalize()}ForCausalLM"],
        "model_type": FAMILIES[arch],
        "vocab_size": embedding.shape[0] if embedding else 0,
        "hidden_size": width,
        "intermediate_size": file.whole(f"{arch}.feed_forward_length"),
        "num_hidden_layers": file.whole(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.whole(f"{arch}.context_length"),
        "rms_norm_eps": file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": file.number(f"{arch}.rope.freq_base", 10000.0),
    }
    config["rope_scaling"] = _rope_scaling(file, arch, config)
    if arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
        if window := file.whole("llama.attention.sliding_window", 0):
            config |= {"model_type": "mistral", "sliding_window": window}
            config["architectures"] = ["MistralForCausalLM"]
    return config


def _rope_scaling(file: GGUFFile, arch: str, config: dict[str, Any]) -> dict | None:
    """`rope_scaling` of config.json."""
    key = f"{arch}.rope.scaling."
    names = [n for n in (f"{key}factor", f"{arch}.rope.scale_linear") if n in file.metadata]
    # As in llama.cpp a factor without a type is linear, and 0 is none.
    factor = file.number(names[0]) if names and file.metadata[names[0]] else 1.0
    kind = file.text(f"{key}type", "linear")
    kind = "none" if kind == "linear" and factor == 1 else kind
    divisors = file.tensors.get(FREQUENCY_DIVISORS)
    if kind not in ("none", "linear", "yarn") or (divisors and kind != "none"):
        raise UserError(f"{file.path}: rope scaling {kind!r} is not supported here")
    for name, value in EXPECTED_SCALING.items():
        if file.metadata.get(key + name, value) != value:
            raise UserError(f"{file.path}: {key}{name} is only supported as {value}")
    if divisors is not None:
        return _llama3_scaling(divisors, config)
    if kind != "yarn":
        return {"rope_type": "linear", "factor": factor} if kind == "linear" else None
    original = file.whole(
        f"{key}original_context_length", config["max_position_embeddings"]
    )
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    yarn["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        yarn[name] = file.metadata.get(f"{key}yarn_{name}")
    return yarn | {"attention_factor": file.metadata.get(f"{key}yarn_attn_factor")}


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
    found = divisors.unpacked()
    factor = float(found.max())
    low, high, context = LLAMA3_SCALING.values()
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    c = context / (2 * math.pi * config["rope_theta"] ** exponents)
    m = np.clip((c - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - m) / factor + m)
    if not np.allclose(found, expected, rtol=1e-3):
        raise unsupported
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_SCALING}


def named_tensors(file: GGUFFile, config: dict[str, Any]) -> dict[str, BlockTensor]:
    """The tensors by their Hugging Face names.

    Raises:
      UserError: one is missing, of another shape than the metadata says, or unknown.
    """
    sizes = {
        "V": config["vocab_size"],
        "D": config["hidden_size"],
        "F": config["intermediate_size"],
        "H": config["head_dim"],
        "Q": config["head_dim"] * config["num_attention_heads"],
        "K": config["head_dim"] * config["num_key_value_heads"],
    }
    named = {}
    known = {FREQUENCY_DIVISORS}
    for name, theirs, dimensions in _expected(config):
        tensor = file.tensors.get(name)
        if tensor is None:
            raise UserError(f"{file.path}: tensor {name!r} is missing")
        shape = tuple(sizes[letter] for letter in dimensions)
        if tensor.shape != shape:
            raise UserError(
                f"{file.path}: tensor {name!r} has shape {list(tensor.shape)}, the metadata asks "
                f"for {list(shape)}"
            )
        named[theirs] = tensor
        known.add(name)
    if unknown := sorted(file.tensors.keys() - known):
        raise UserError(
            f"{file.path}: this model has no place for tensor {unknown[0]!r} (of "
            f"{len(unknown)} such)"
        )
    return named


def _expected(config: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(GGUF name, Hugging Face name, dimensions) of every tensor of such a model."""
    outside = OUTSIDE_LAYERS | ({} if config["tie_word_embeddings"] else OUTPUT)
    for name, (theirs, dimensions) in outside.items():
        yield name, theirs, dimensions
    inside = dict(IN_LAYERS)
    if config["model_type"] == "qwen2":
        inside |= QKV_BIAS
    if config["model_type"] == "qwen3":
        inside |= QK_NORM
    if config.get("attention_bias"):
        inside |= QKV_BIAS | OUT_BIAS
    if config.get("mlp_bias"):
        inside |= MLP_BIAS
    for i in range(config["num_hidden_layers"]):
        for name, (theirs, dimensions) in inside.items():
            yield f"blk.{i}.{name}", f"model.layers.{i}.{theirs}", dimensions


def row_order(tensor: BlockTensor, config: dict[str, Any]) -> np.ndarray | None:
    """The rows of a tensor in the order of Hugging Face files; None if the order is the same.

    llama.cpp rotates pairs of neighbours (2i, 2i + 1), Hugging Face the two halves of a head (i, i + H / 2).
    So for `llama` it reorders the rows of the query and key projections and their biases.
    """
    part = tensor.name.split(".")[-2]
    if config["model_type"] not in ("llama", "mistral") or part not in ("attn_q", "attn_k"):
        return None
    rows = np.arange(tensor.shape[0]).reshape(-1, config["head_dim"] // 2, 2)
    return rows.swapaxes(1, 2).ravel()


def open_tensors(path: str) -> Tensors:
    """The tensors of a GGUF file by their Hugging Face names; they are read later.

    Raises:
      UserError: as for `hf_config` and `named_tensors`.
    """
    file = read_gguf(path)
    config = hf_config(file)
    return {
        name: _open_tensor(tensor, row_order(tensor, config))
        for name, tensor in named_tensors(file, config).items()
    }


def _open_tensor(tensor: BlockTensor, order: np.ndarray | None) -> Tensor:
    def read(index: tuple[slice, ...]) -> np.ndarray:
        if len(tensor.shape) == 1:
            return unpacked(slice(None)).ravel()[index]
        return unpacked(index[0])[:, index[1]]

    def unpacked(rows: Any) -> np.ndarray:
        if len(tensor.shape) == 1:  # one row of blocks
            values = tensor.unpacked()
            return values if order is None else values[order]
        return tensor.unpacked_rows(rows if order is None else order[rows])

    def rows() -> np.ndarray:
        return tensor.read() if order is None else tensor.read()[order]

    blocks = Blocks(tensor.kind.name, rows, unpacked, tensor.damaged())
    return Tensor(tensor.file, tensor.shape, "float32", read, blocks)
