"""Write a backbone and its Medusa heads as one Hugging Face model.

Tensors are copied file to file, a shard at a time, without a device.
"""

import os

import numpy as np

from medusa_jax.formats.export import Export
from medusa_jax.formats.medusa_files import is_head_key, medusa_arrays
from medusa_jax.interop.shards import save_weights
from medusa_jax.interop.stored_heads import made_directory
from medusa_jax.interop.tensor import cast, whole
from medusa_jax.interop.tensors import read_json, save_json
from medusa_jax.interop.tokenizer_files import copy_tokenizer


def to_merged(export: Export, out: str) -> None:
    """Write a full model in Hugging Face format with its heads in it (Medusa v1.0).

    Raises:
      UserError: weights that are not finite in the stored type; the disk is full.
    """
    heads, base, dtype = export.stored.heads, export.base, export.dtype
    arrays = medusa_arrays(export, "medusa_head.")
    backbone = {key: t for key, t in base.tensors.items() if not is_head_key(key)}

    def read(key: str) -> np.ndarray:
        array = arrays[key] if key in arrays else whole(backbone[key])
        return cast(array, dtype, repr(key)) if dtype else array

    first = next(iter(backbone.values()))
    kind = np.dtype(dtype or first.dtype)
    shapes = {key: tensor.shape for key, tensor in backbone.items()}
    shapes |= {key: array.shape for key, array in arrays.items()}
    save_weights(made_directory(out), shapes, read, kind)
    raw = read_json(os.path.join(base.directory, "config.json"))
    if raw.get("tie_word_embeddings"):
        raw["tie_word_embeddings"] = base.config.tie_embeddings
    raw["medusa_num_heads"] = heads.n_heads
    raw["medusa_num_layers"] = heads.n_layers
    if dtype:
        raw |= {"torch_dtype": dtype, "dtype": dtype}
    copy_tokenizer("", base.directory, out)
    save_json(os.path.join(out, "config.json"), raw)
