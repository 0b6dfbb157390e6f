"""Write Hugging Face model directories: weights as one safetensors file, or shards of 5 GB with an index."""

import glob
import math
import os
import secrets
from collections.abc import Callable

import numpy as np
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.files.hf_config import SCALINGS, SIZES
from medusa_jax.files.hf_keys import locate
from medusa_jax.files.json_files import save_json
from medusa_jax.files.source import flatten
from medusa_jax.files.tensors import save_safetensors
from medusa_jax.hosts import on_host
from medusa_jax.sharding import Params
from medusa_jax.whole_files import Json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


def config_to_hf(config: LlamaConfig) -> Json:
    """`config.json` for the family whose features the backbone uses.

    Raises:
      UserError: no family has this combination.
    """
    c = config
    full_layers = c.sliding_window_start_layer if c.sliding_window else c.n_layers
    if c.qk_norm and c.qkv_bias == c.out_bias and not c.mlp_bias:
        family = "qwen3"
    elif not c.qk_norm and c.qkv_bias and not c.out_bias and not c.mlp_bias:
        family = "qwen2"
    elif not c.qk_norm and not c.sliding_window and c.qkv_bias == c.out_bias:
        family = "llama"
    elif not (c.qk_norm or c.qkv_bias or c.out_bias or c.mlp_bias or full_layers):
        family = "mistral"
    else:
        raise UserError(
            "no Hugging Face model class has this mix of biases, q/k norms and sliding window: "
            f"{c}"
        )
    rope: Json = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_scaling != "none":
        rope["rope_type"] = c.rope_scaling
        rope |= {name: getattr(c, ours) for name, ours in SCALINGS[c.rope_scaling].items()}
    if c.rope_scaling == "yarn" and not c.rope_truncate:
        rope["truncate"] = False
    raw: Json = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        **{name: getattr(c, ours) for name, ours in SIZES.items()},
        "hidden_act": "silu",
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.rms_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        # The old fields too, for readers older than transformers 5.
        "rope_theta": c.rope_theta,
        "rope_scaling": None if c.rope_scaling == "none" else rope,
        "rope_parameters": rope,
    }
    if family in ("llama", "qwen3"):
        raw["attention_bias"] = c.qkv_bias
    if family == "llama":
        raw["mlp_bias"] = c.mlp_bias
    if family == "mistral":
        raw["sliding_window"] = c.sliding_window
    if family.startswith("qwen"):
        raw["use_sliding_window"] = bool(c.sliding_window)
        raw["sliding_window"] = c.sliding_window or None
        raw["max_window_layers"] = full_layers
    return raw


def save_backbone(
    directory: str,
    config: LlamaConfig,
    params: Params,
    dtype: DTypeLike = "bfloat16",
    extra: Json | None = None,
    write: bool = True,
) -> None:
    """Write `config.json` and weights that transformers (and we) can load, see `save_weights`.

    Args:
      extra: further fields for config.json, such as `bos_token_id` and `eos_token_id`.
      write: False on processes that only take part in gathering the arrays.

    Raises:
      UserError: no transformers class has this combination of features; or the disk is full.
    """
    kind = np.dtype(dtype).name
    raw = config_to_hf(config) | {"dtype": kind, "torch_dtype": kind}
    leaves, transposed = {}, {}
    for path, leaf in flatten(params).items():
        name, is_transposed = locate(path)
        leaves[name], transposed[name] = leaf, is_transposed

    def read(name: str) -> np.ndarray:
        array = on_host(leaves[name]).astype(np.dtype(dtype))
        return array.T if transposed[name] else array

    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    save_weights(directory, shapes, read, dtype, write)
    if write:
        save_json(os.path.join(directory, "config.json"), raw | (extra or {}))


def save_weights(
    directory: str,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    dtype: DTypeLike,
    write: bool = True,
) -> None:
    """Write a model's tensors in the form of Hugging Face loaders.

    Replaces old weights atomically: shards get new names, and the index, or the single file, is written last. The
    host holds one shard at a time.

    Args:
      shapes: key -> shape of the tensor.
      read: key -> the array to store.
      dtype: the stored type.
      write: False on processes that only take part in reading; the order is the same on all.

    Raises:
      UserError: the disk is full or the directory is not writable.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    itemsize = np.dtype(dtype).itemsize
    # New shards must not overwrite the shards that an existing index names.
    has_index = os.path.exists(os.path.join(directory, INDEX))
    stem = f"model-{secrets.token_hex(4)}" if has_index else "model"
    plan = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: math.prod(shape) * itemsize,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    files = plan.filename_to_tensors
    if not plan.is_sharded:
        files = {WEIGHTS: list(shapes)}
    for name, keys in files.items():
        path = os.path.join(directory, name)
        if not write:
            for key in keys:
                read(key)
            continue
        arrays = {key: read(key) for key in keys}
        save_safetensors(path, arrays, {"format": "pt"})
    if not write:
        return
    index = os.path.join(directory, INDEX)
    if plan.is_sharded:
        content = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        save_json(index, content)
    elif has_index:
        os.remove(index)
    for path in glob.glob(os.path.join(glob.escape(directory), "model*.safetensors")):
        if os.path.basename(path) not in files:
            os.remove(path)
