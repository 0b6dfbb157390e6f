"""Find draft heads and recognise their layout: this project's or a published one.

A path is a directory, a file of weights in it, or a hub id. The layout is recognised by the keys of the weights.
"""

import dataclasses
import os

from medusa_jax.errors import UserError
from medusa_jax.interop import tensors as tensor_files
from medusa_jax.interop.base_files import BaseFiles
from medusa_jax.interop.eagle3_files import is_eagle3, open_eagle3
from medusa_jax.interop.eagle_files import is_eagle, open_eagle
from medusa_jax.interop.hub import resolve
from medusa_jax.interop.hydra_files import is_hydra, open_hydra
from medusa_jax.interop.medusa_files import FULL_MODEL, is_medusa, open_medusa
from medusa_jax.interop.own_heads import DESCRIPTION, open_own
from medusa_jax.interop.own_heads import WEIGHTS as OWN_WEIGHTS
from medusa_jax.interop.stored_heads import StoredHeads
from medusa_jax.interop.tensor import Tensors
from medusa_jax.interop.tensors import optional_json

DESCRIPTIONS = [DESCRIPTION, OWN_WEIGHTS, "tree.json", "config.json", "adapter_config.json"]
# In order of preference.
SAFE = [
    "medusa_lm_head.safetensors",
    "hydra_lm_head.safetensors",
    "adapter_model.safetensors",
]
TORCH = ["medusa_lm_head.pt", "hydra_lm_head.pt", "adapter_model.bin"]
MODEL = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
]
KNOWN = (
    "heads that train.py wrote (heads.json, heads.safetensors), published Medusa, Hydra, EAGLE-1 or "
    "EAGLE-3 heads (medusa_lm_head, hydra_lm_head, an adapter, a full model, vLLM's layout)"
)


def open_heads(path_or_id: str) -> StoredHeads:
    """Open the draft heads in a directory, a file or a hub repository; weights are read later.

    Raises:
      UserError: no heads in a known layout, or unreadable.
    """
    path = _local(path_or_id)
    if os.path.isdir(path):
        return _open_directory(path_or_id, path)
    directory = os.path.dirname(path) or "."
    if os.path.basename(path) in (DESCRIPTION, OWN_WEIGHTS):
        return open_own(directory)
    return _open_published(path_or_id, path, directory, tensor_files.open_weights(path))


def _local(path_or_id: str) -> str:
    """A local file or directory; downloads only the needed files."""
    if os.path.exists(path_or_id):
        return path_or_id
    folder = resolve(path_or_id, DESCRIPTIONS)
    if os.path.isfile(os.path.join(folder, DESCRIPTION)):
        return folder
    for names in (SAFE, TORCH):
        folder = resolve(path_or_id, [*DESCRIPTIONS, *names])
        if _first(folder, names):
            return folder
    return resolve(path_or_id)


def _first(folder: str, names: list[str]) -> str:
    """The path of the first file that exists, "" if none does."""
    paths = (os.path.join(folder, name) for name in names)
    return next((path for path in paths if os.path.isfile(path)), "")


def _open_directory(asked: str, folder: str) -> StoredHeads:
    if _first(folder, [DESCRIPTION, OWN_WEIGHTS]):
        return open_own(folder)
    if path := _first(folder, SAFE + TORCH):
        return _open_published(asked, path, folder, tensor_files.open_weights(path))
    if path := _first(folder, MODEL):
        tensors = tensor_files.open_checkpoint(folder)
        return _open_published(asked, path, folder, tensors)
    raise _no_heads(asked, folder)


def _open_published(asked: str, path: str, folder: str, tensors: Tensors) -> StoredHeads:
    config = optional_json(os.path.join(folder, "config.json"))
    if is_hydra(tensors):
        return open_hydra(path, folder, tensors, config)
    if is_eagle3(tensors):  # before EAGLE-1, whose keys speculators' files have, too
        return open_eagle3(path, folder, tensors, config)
    if is_eagle(tensors):
        return open_eagle(path, folder, tensors, config)
    if not is_medusa(tensors):
        raise _no_heads(asked, folder)
    stored = open_medusa(path, folder, tensors, config)
    if stored.layout == FULL_MODEL and "model.embed_tokens.weight" in tensors:
        # These heads were trained with their backbone and fit no other.
        base = BaseFiles.open(folder)
        record = {"fingerprint": base.fingerprint()}
        stored = dataclasses.replace(stored, base=record)
    return stored


def _no_heads(asked: str, folder: str) -> UserError:
    inside = os.path.join(folder, "heads")
    if os.path.isfile(os.path.join(inside, DESCRIPTION)):
        return UserError(f"{asked} holds a model with its heads: give --drafter {inside}")
    if os.path.isfile(os.path.join(folder, "config.json")):
        return UserError(
            f"{asked} holds a model, not draft heads: give it to --model, and --drafter {KNOWN}"
        )
    return UserError(f"{asked} holds no draft heads: --drafter takes {KNOWN}")
