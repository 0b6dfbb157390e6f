"""Read and write Hugging Face model directories; `hf_config.py` handles config.json."""

import os
import re
from collections.abc import Callable
from functools import partial

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.config import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.interop import tensors as tensor_files
from medusa_jax.interop.fingerprint import Fingerprint, fingerprint
from medusa_jax.interop.hf_config import config_to_hf, read_config
from medusa_jax.interop.hub import resolve
from medusa_jax.interop.shards import save_weights
from medusa_jax.interop.tensors import optional_json
from medusa_jax.model.llama import abstract_params
from medusa_jax.sharding import Params
from medusa_jax.whole_files import Json

__all__ = [
    "Fingerprint",
    "abstract_params",
    "config_to_hf",
    "fingerprint",
    "generation_config",
    "load_backbone",
    "locate",
    "read_config",
    "resolve",
    "save_backbone",
]

# Buffers that old versions stored and every version recomputes.
HARMLESS = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
# Medusa heads merged into a model, which --drafter reads.
HEADS = "medusa_head."


def generation_config(path: str) -> Json:
    """`generation_config.json` of a model directory or hub id; {} if there is none."""
    name = "generation_config.json"
    return optional_json(os.path.join(resolve(path, [name]), name))


def locate(path: str) -> tuple[str, bool]:
    """Parameter path -> (Hugging Face key, whether it is stored transposed).

    `layers_0/self_attn/q_proj/kernel` [in, out] is `model.layers.0.self_attn.q_proj.weight`
    [out, in]; `norm/scale` is `model.norm.weight`, unchanged.
    """
    name = re.sub(r"^layers_(\d+)/", r"layers/\1/", path).replace("/", ".")
    if not name.startswith("lm_head."):
        name = f"model.{name}"
    stem, leaf = name.rsplit(".", 1)
    return f"{stem}.{'bias' if leaf == 'bias' else 'weight'}", leaf == "kernel"


def load_backbone(
    path: str,
    mesh: Mesh,
    dtype: DTypeLike = "float32",
    convert: Callable[[LlamaConfig, Params], Params] | None = None,
    in_blocks: bool = False,
) -> tuple[LlamaConfig, Params]:
    """Configuration and parameters of a model directory or hub id, placed on the mesh.

    Kernels are transposed to [in, out]; every device reads only its slices.

    Args:
      dtype: type of the parameters; tensors of another type are cast on the host.
      convert: converts each entry of the tree, such as a layer, before the next is read, so that two forms of the
        whole model never coexist.
      in_blocks: `convert` gets matrices of a GGUF file as `BlockRows`.

    Raises:
      UserError: unreadable, or keys that contradict the configuration (checked before anything is read).
    """
    directory = resolve(path)
    config = read_config(directory)
    stored = tensor_files.open_checkpoint(directory)
    layers = {
        int(m[1]) for name in stored if (m := re.match(r"model\.layers\.(\d+)\.", name))
    }
    if (count := len(layers)) != config.n_layers:
        raise UserError(
            f"{directory}: the weights hold {count} layers, config.json says {config.n_layers}"
        )
    abstract = abstract_params(config)

    def ignore(name: str) -> bool:
        copy_of_embedding = config.tie_embeddings and name == "lm_head.weight"
        heads = name.startswith(HEADS)
        return copy_of_embedding or heads or bool(HARMLESS.search(name))

    convert_entry = None if convert is None else partial(convert, config)
    params = tensor_files.load_tree(
        abstract, mesh, stored, locate, dtype, directory, ignore, convert_entry, in_blocks
    )
    return config, params


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
    for path, leaf in tensor_files.flatten(params).items():
        name, is_transposed = locate(path)
        leaves[name], transposed[name] = leaf, is_transposed

    def read(name: str) -> np.ndarray:
        array = tensor_files.host_array(leaves[name], dtype)
        return array.T if transposed[name] else array

    if write:
        os.makedirs(directory, exist_ok=True)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    save_weights(directory, shapes, read, dtype, write)
    if write:
        tensor_files.save_json(os.path.join(directory, "config.json"), raw | (extra or {}))
