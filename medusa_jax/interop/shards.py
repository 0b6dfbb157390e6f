"""A model's weights as safetensors: one file, or shards of 5 GB with an index."""

import glob
import math
import os
import secrets
from collections.abc import Callable

import numpy as np
from jax.typing import DTypeLike

from medusa_jax.interop import tensors as tensor_files

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


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
    # New shards must not overwrite those of an existing index.
    taken = os.path.exists(os.path.join(directory, INDEX))
    stem = f"model-{secrets.token_hex(4)}" if taken else "model"
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
        tensor_files.save_safetensors(path, arrays, {"format": "pt"})
    if not write:
        return
    index = os.path.join(directory, INDEX)
    if plan.is_sharded:
        content = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        tensor_files.save_json(index, content)
    elif taken:
        os.remove(index)
    for path in glob.glob(os.path.join(glob.escape(directory), "model*.safetensors")):
        if os.path.basename(path) not in files:
            os.remove(path)
