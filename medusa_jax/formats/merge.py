"""Write a backbone and its Medusa heads as one Hugging Face model, with adapters merged.

Tensors are copied file to file, a shard at a time, without a device.
"""

import math
import os
import re
from collections.abc import Callable

import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.formats.export import Export
from medusa_jax.formats.medusa_files import ADAPTER, is_head_key, medusa_arrays
from medusa_jax.interop.shards import save_weights
from medusa_jax.interop.stored_heads import StoredHeads, made_directory
from medusa_jax.interop.tensor import Tensor, Tensors, cast, whole
from medusa_jax.interop.tensors import read_json, save_json
from medusa_jax.interop.tokenizer_files import copy_tokenizer
from medusa_jax.whole_files import Json

PEFT = "base_model.model."
# Fields of LoRA configurations that would change the formula below.
UNSUPPORTED = ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "lora_bias")


def to_merged(export: Export, out: str) -> None:
    """Write a full model in Hugging Face format with its heads in it (Medusa v1.0).

    Raises:
      UserError: the adapter is not plain LoRA, does not fit or results in weights that are not finite; the disk
        is full.
    """
    stored, base, dtype = export.stored, export.base, export.dtype
    heads = medusa_arrays(export, "medusa_head.")
    backbone = {key: t for key, t in base.tensors.items() if not is_head_key(key)}
    changed = _merge_adapter(backbone, stored, dtype) if stored.layout == ADAPTER else {}

    def read(key: str) -> np.ndarray:
        if key in heads:
            array = heads[key]
        elif key in changed:
            array = changed[key]()
        else:
            array = whole(backbone[key])
        return cast(array, dtype, repr(key)) if dtype else array

    first = next(iter(backbone.values()))
    kind = np.dtype(dtype or first.dtype)
    shapes = {key: tensor.shape for key, tensor in backbone.items()}
    shapes |= {key: array.shape for key, array in heads.items()}
    save_weights(made_directory(out), shapes, read, kind)
    raw = read_json(os.path.join(base.directory, "config.json"))
    if raw.get("tie_word_embeddings"):
        raw["tie_word_embeddings"] = base.config.tie_embeddings
    raw["medusa_num_heads"] = stored.heads.n_heads
    raw["medusa_num_layers"] = stored.heads.n_layers
    if dtype:
        raw |= {"torch_dtype": dtype, "dtype": dtype}
    copy_tokenizer("", base.directory, out)
    save_json(os.path.join(out, "config.json"), raw)


def _merge_adapter(
    backbone: Tensors, stored: StoredHeads, dtype: str
) -> dict[str, Callable[[], np.ndarray]]:
    """Key of the backbone -> function that reads it with the adapter merged, in float32.

    W + s B A with s = alpha / r (alpha / sqrt(r) for rsLoRA); modules that the adapter saves whole replace the
    backbone's.
    """
    file = os.path.join(stored.directory, "adapter_config.json")
    rest = {key: t for key, t in stored.tensors.items() if not is_head_key(key)}
    if not rest:
        return {}
    config = read_json(file)
    if unsupported := [name for name in UNSUPPORTED if config.get(name)]:
        raise UserError(f"{file}: {unsupported[0]} is not supported, only plain LoRA")
    scale = _scale(file, config)
    changed: dict[str, Callable[[], np.ndarray]] = {}
    for key in rest:
        match = re.fullmatch(
            rf"{re.escape(PEFT)}(.+?)(?:\.modules_to_save)?(?:\.lora_([AB]))?"
            r"(?:\.default)?\.(weight|bias)",
            key,
        )
        target = f"{match[1]}.{match[3]}" if match else ""
        if match is None or target not in backbone:
            raise UserError(
                f"{stored.source} has a key that the model has no place for: {key!r}"
            )
        if match[2] is None:
            _fits(stored.source, key, rest[key].shape, backbone[target].shape)
            changed[target] = lambda key=key: whole(rest[key])  # type: ignore[misc]
        elif match[2] == "A":
            other = key.replace(".lora_A", ".lora_B")
            if other not in rest:
                raise UserError(f"key {other!r} is missing from {stored.source}")
            product = rest[other].shape[:1] + rest[key].shape[1:]
            _fits(stored.source, key, product, backbone[target].shape)
            what = f"{target!r} with the adapter of {stored.source} merged in"
            factors = rest[key], rest[other]
            changed[target] = _with_lora(what, backbone[target], *factors, scale, dtype)
    return changed


def _with_lora(
    what: str, stored: Tensor, a: Tensor, b: Tensor, scale: float, dtype: str
) -> Callable[[], np.ndarray]:
    @np.errstate(over="ignore", invalid="ignore")  # checked by `cast`
    def read() -> np.ndarray:
        weight = whole(stored)
        down, up = (whole(factor).astype(np.float32) for factor in (a, b))
        merged = weight.astype(np.float32) + scale * (up @ down)
        return cast(merged, dtype or weight.dtype, what)

    return read


def _scale(file: str, config: Json) -> float:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)):
        raise UserError(f"{file} needs r and lora_alpha, it has {rank!r} and {alpha!r}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _fits(source: str, key: str, theirs: tuple[int, ...], ours: tuple[int, ...]) -> None:
    if tuple(theirs) != tuple(ours):
        raise UserError(
            f"key {key!r} in {source} makes a weight of shape {list(theirs)}, the model's has "
            f"{list(ours)}"
        )
