"""Translate GGUF metadata and tensor names to Hugging Face's."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.files.gguf.reader import BlockTensor, GGUFFile, read_gguf
from medusa_jax.files.tensor import Tensor, Tensors
from medusa_jax.model.blocks import Blocks

# Values of general.architecture, which are the model types, too; Mistral's files say "llama".
FAMILIES = ("llama", "qwen2", "qwen3")

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
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# A number that multiplies a module's output; llama.cpp reads `.input_scale`, but does not use it.
SCALE = re.compile(
    r"(blk\.\d+\.(?:attn_(?:q|k|v|output)|ffn_(?:gate|up|down)))\.(input_)?scale"
)

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
            f"{file.file}: architecture {arch!r} is not supported (there are: "
            f"{', '.join(FAMILIES)})"
        )
    if file.whole(f"{arch}.expert_count", 0):
        raise UserError(f"{file.file}: a mixture of experts is not supported")
    width = file.count(f"{arch}.embedding_length")
    layers = file.count(f"{arch}.block_count")
    heads = file.per_layer(f"{arch}.attention.head_count", layers)
    head_dim = file.count(f"{arch}.attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if file.count(f"{arch}.{name}", head_dim) != head_dim:
            file.refuse(f"{arch}.{name}", f"{head_dim}, the size of a head")
    embedding = file.tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [f"{arch.capitalize()}ForCausalLM"],
        "model_type": arch,
        "vocab_size": embedding.shape[0] if embedding else 0,
        "hidden_size": width,
        "intermediate_size": file.per_layer(f"{arch}.feed_forward_length", layers),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.per_layer(
            f"{arch}.attention.head_count_kv", layers, heads
        ),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.count(f"{arch}.context_length"),
        "rms_norm_eps": file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": file.number(f"{arch}.rope.freq_base", 10000.0),
    }
    config["rope_scaling"] = _rope_scaling(file, arch, config)
    if arch != "qwen2":
        names = " ".join(file.tensors)
        config["attention_bias"] = bool(re.search(r"\battn_\w+\.bias", names))
        config["mlp_bias"] = bool(re.search(r"\bffn_\w+\.bias", names))
    if arch == "llama" and (window := file.whole("llama.attention.sliding_window", 0)):
        config |= {"model_type": "mistral", "sliding_window": window}
        config["architectures"] = ["MistralForCausalLM"]
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
    if kind not in ("none", "linear", "yarn") or (divisors and kind != "none"):
        raise UserError(f"{file.file}: rope scaling {kind!r} is not supported here")
    file.expect({key + name: (value,) for name, value in EXPECTED_SCALING.items()})
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
        yarn[name] = file.values.get(f"{key}yarn_{name}")
    return yarn | {"attention_factor": file.values.get(f"{key}yarn_attn_factor")}


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


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; unknown names are unchanged.

    Example: "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight".
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    i, module, leaf = match.groups() if match else (None, "", "")
    stem = MODULES.get(module) if i is None else IN_LAYERS.get(module)
    if stem is None:
        return name
    return f"{stem}.{leaf}" if i is None else f"model.layers.{i}.{stem}.{leaf}"


def row_order(tensor: BlockTensor, config: dict[str, Any]) -> np.ndarray | None:
    """The rows of a tensor in the order of Hugging Face files; None if the order is the same.

    llama.cpp rotates pairs of neighbours (2i, 2i + 1), Hugging Face the two halves of a head (i, i + H / 2).
    So for `llama` it reorders the rows of the query and key projections and their biases.
    """
    part = tensor.name.split(".")[-2:-1]
    if config["model_type"] not in ("llama", "mistral") or part not in (
        ["attn_q"],
        ["attn_k"],
    ):
        return None
    if tensor.shape[0] % config["head_dim"]:
        return None  # not a projection's: refused by its name and shape
    rows = np.arange(tensor.shape[0]).reshape(-1, config["head_dim"] // 2, 2)
    return rows.swapaxes(1, 2).ravel()


def open_gguf(path: str) -> Tensors:
    """The tensors of a GGUF file by their Hugging Face names; they are read later.

    Raises:
      UserError: as for `hf_config`.
    """
    file = read_gguf(path)
    return hf_tensors(file, hf_config(file))


def hf_tensors(file: GGUFFile, config: dict[str, Any]) -> Tensors:
    """`open_gguf` of an open file with this `hf_config`."""
    scales = {
        name: match
        for name, tensor in file.tensors.items()
        if (match := SCALE.fullmatch(name)) and tensor.shape == (1,)
    }
    factors = {m[1]: file.tensors[n].unpacked() for n, m in scales.items() if not m[2]}
    tensors: Tensors = {}
    for name, tensor in file.tensors.items():
        if name == FREQUENCY_DIVISORS or name in scales:
            continue
        tensor = replace(tensor, order=row_order(tensor, config))
        module, _, leaf = name.rpartition(".")
        # llama.cpp adds the bias after the factor in attention, before it in the MLP.
        factor = factors.get(module) if leaf == "weight" or ".ffn_" in name else None
        tensors[hf_name(name)] = _open_tensor(tensor, factor, exact=not factors)
    return _zero_biases(tensors, config) | tensors


def _zero_biases(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Zeros for all biases that the configuration has; llama.cpp takes a file with some of them."""
    parts = []
    if config["model_type"] == "qwen2" or config["attention_bias"]:
        parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    parts += ["self_attn.o_proj"] if config.get("attention_bias") else []
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

    blocks = Blocks(tensor.kind.name, tensor.read, unpacked, tensor.damaged(), exact)
    return Tensor(tensor.file, tensor.shape, "float32", read, blocks)
