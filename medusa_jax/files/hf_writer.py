"""Write Hugging Face model directories: weights as one safetensors file, or shards of 5 GB with an index."""

import glob
import math
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import jax
import numpy as np
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.files.families import ACTIVATIONS, FAMILIES, FIELDS, Family
from medusa_jax.files.hf_config import DIVISORS, LAYER_KINDS, SCALINGS, parse_config
from medusa_jax.files.hf_keys import locate
from medusa_jax.files.source import flatten
from medusa_jax.files.stored_forms import from_llama
from medusa_jax.files.tensor import Tensor, read_whole
from medusa_jax.files.tensors import INDEX, WEIGHTS, save_safetensors
from medusa_jax.hosts import first, on_host
from medusa_jax.sharding import Params
from medusa_jax.whole_files import Json, write_json

SINGLE_FILE = WEIGHTS[0]
INDEX_FILE = SINGLE_FILE + INDEX
SHARD_BYTES = 5 * 10**9
# Names of transformers' classes that the model_type does not tell.
CLASSES = {"smollm3": "SmolLM3", "gemma3_text": "Gemma3"}
CLASSES |= {"hunyuan_v1_dense": "HunYuanDenseV1"}


def config_to_hf(config: LlamaConfig) -> Json:
    """`config.json` of the first family that has this shape.

    Raises:
      UserError: no family has it.
    """
    for model_type, family in FAMILIES.items():
        raw = _config_of(config, model_type, family)
        with suppress(UserError):
            if parse_config("config.json", raw) == config:
                return raw
    raise UserError(
        "no Hugging Face model class has this mix of biases, norms, rotation, multipliers and windows: "
        f"{config}"
    )


def _config_of(c: LlamaConfig, model_type: str, family: Family) -> Json:
    """`config.json` of a family, as far as it can describe the shape."""
    rope = _rope_of(c)
    name = CLASSES.get(model_type, model_type.capitalize())
    windows = [c.has_window(i) for i in range(c.n_layers)]
    raw: Json = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        **{name: getattr(c, ours) for name, ours in FIELDS.items()},
        "hidden_act": next(k for k, ours in ACTIVATIONS.items() if ours == c.activation),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        # The old fields too, for readers older than transformers 5.
        "rope_theta": c.rope_theta,
        "rope_scaling": None if c.rope_scaling == "none" else rope,
        "rope_parameters": rope,
        **{name: getattr(c, ours[0]) for name, ours in family.reads.items()},
    }
    scale = c.attention_multiplier or c.head_dim**-0.5
    scales = {"attention_multiplier": scale, "query_pre_attn_scalar": round(scale**-2)}
    raw |= {
        name: x for name, x in scales.items() if name in {**family.reads, **family.defaults}
    }
    if c.rope_scaling == "longrope":
        raw["original_max_position_embeddings"] = c.rope_original_max_position
        raw["max_position_embeddings"] = c.longest
    if family.partial:
        raw["partial_rotary_factor"] = (c.rope_dim or c.head_dim) / c.head_dim
        rope["partial_rotary_factor"] = raw["partial_rotary_factor"]
    if family.rotates == "listed":
        raw["no_rope_layers"] = [int(c.rotation(i) != "none") for i in range(c.n_layers)]
    if family.windows:
        raw["sliding_window"] = c.sliding_window or None
    if family.windows == "late":
        raw["use_sliding_window"] = any(windows)
        raw["max_window_layers"] = windows.index(True) if any(windows) else c.n_layers
    if family.windows in ("late", "period", "fourth") or c.window_layers:
        raw["layer_types"] = [LAYER_KINDS[window] for window in windows]
    if family.window_theta:
        local = {"rope_type": "default", "rope_theta": c.rope_window_theta or c.rope_theta}
        raw["rope_local_base_freq"] = local["rope_theta"]
        raw["rope_parameters"] = {LAYER_KINDS[False]: rope, LAYER_KINDS[True]: local}
    usual = {ours: theirs for theirs, ours in family.names.items()}
    return {usual.get(name, name): value for name, value in raw.items()}


def _rope_of(c: LlamaConfig) -> Json:
    """`rope_parameters` of the layers that rotate by the text's base."""
    rope: Json = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_scaling != "none":
        rope["rope_type"] = c.rope_scaling
        rope |= {name: getattr(c, ours) for name, ours in SCALINGS[c.rope_scaling].items()}
    if c.rope_scaling == "yarn" and not c.rope_truncate:
        rope["truncate"] = False
    if c.query_growth:
        rope["llama_4_scaling_beta"] = c.query_growth
    if c.rope_scaling == "longrope":
        del rope["factor"]
        rope |= {name: list(getattr(c, ours)) for name, ours in DIVISORS.items()}
    return rope


def save_backbone(
    directory: str,
    config: LlamaConfig,
    params: Params,
    dtype: DTypeLike = "bfloat16",
    extra: Json | None = None,
) -> None:
    """Write `config.json` and weights that transformers (and we) can load, see `save_weights`.

    Args:
      extra: further fields for config.json, such as `bos_token_id` and `eos_token_id`.

    Raises:
      UserError: no transformers class has this combination of features; or the disk is full.
    """
    kind = np.dtype(dtype).name
    raw = config_to_hf(config) | {"dtype": kind, "torch_dtype": kind}
    tensors = {}
    for path, leaf in flatten(params).items():
        name, transposed = locate(path)
        tensors[name] = replace(_tensor(leaf, transposed), name=name)
    tensors = from_llama(tensors, FAMILIES[raw["model_type"]], config)

    def read(name: str) -> np.ndarray:
        return read_whole(tensors[name]).astype(np.dtype(dtype))

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    save_weights(directory, shapes, read, dtype)
    if first():
        write_json(os.path.join(directory, "config.json"), raw | (extra or {}))


def _tensor(leaf: jax.Array, transposed: bool) -> Tensor:
    """A parameter as it is stored."""
    turned = np.transpose if transposed else np.asarray
    shape = leaf.shape[::-1] if transposed else leaf.shape
    kind = leaf.dtype.name
    return Tensor("the trained model", shape, kind, lambda i: turned(on_host(leaf))[i])


def save_weights(
    directory: str,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    dtype: DTypeLike,
) -> None:
    """Write a model's tensors in the form of Hugging Face loaders.

    Replaces old weights atomically: shards get new names, and the index, or the single file, is written last. The
    host holds one shard at a time. Every process of a run must call this, since arrays are gathered; process 0 writes.

    Args:
      shapes: key -> shape of the tensor.
      read: key -> the array to store.
      dtype: the stored type.

    Raises:
      UserError: the disk is full or the directory is not writable.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    itemsize = np.dtype(dtype).itemsize
    # New shards must not overwrite the shards that an existing index names.
    has_index = os.path.exists(os.path.join(directory, INDEX_FILE))
    stem = f"model-{secrets.token_hex(4)}" if has_index else "model"
    plan = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: math.prod(shape) * itemsize,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    files = plan.filename_to_tensors
    if not plan.is_sharded:
        files = {SINGLE_FILE: list(shapes)}
    for name, keys in files.items():
        path = os.path.join(directory, name)
        if not first():
            for key in keys:
                read(key)
            continue
        arrays = {key: read(key) for key in keys}
        save_safetensors(path, arrays, {"format": "pt"})
    if not first():
        return
    index = os.path.join(directory, INDEX_FILE)
    if plan.is_sharded:
        content = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(index, content)
    elif has_index:
        os.remove(index)
    for path in glob.glob(os.path.join(glob.escape(directory), "model*.safetensors")):
        if os.path.basename(path) not in files:
            os.remove(path)
