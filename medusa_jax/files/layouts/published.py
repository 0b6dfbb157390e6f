"""Published draft heads: found in a directory, file or hub repository, and recognised by their keys.

Only keys determine the layout, since published configurations contradict their files.
"""

import os

from medusa_jax.errors import UserError
from medusa_jax.files import tensors as tensor_files
from medusa_jax.files.hf import WRAPPER
from medusa_jax.files.hub import resolve
from medusa_jax.files.layouts import (
    dflash_files,
    eagle3_files,
    eagle_files,
    hydra_files,
    medusa_files,
)
from medusa_jax.files.layouts.heads_io import DESCRIPTIONS
from medusa_jax.files.layouts.own_heads import DESCRIPTION
from medusa_jax.files.layouts.stored_heads import StoredHeads
from medusa_jax.files.tensor import rename
from medusa_jax.files.tensors import optional_json

# In the order in which they are asked: speculators' EAGLE-3 files also have EAGLE-1's keys.
LAYOUTS = (hydra_files, dflash_files, eagle3_files, eagle_files, medusa_files)
# In order of preference.
SAFE = [
    "medusa_lm_head.safetensors",
    "hydra_lm_head.safetensors",
    "adapter_model.safetensors",
]
TORCH = ["medusa_lm_head.pt", "hydra_lm_head.pt", "adapter_model.bin"]
KNOWN = (
    "heads that train.py wrote (heads.json, heads.safetensors), published Medusa, Hydra, EAGLE-1, "
    "EAGLE-3, DFlash or DSpark heads (medusa_lm_head, hydra_lm_head, an adapter, a full model, vLLM's layout)"
)


def open_heads(path_or_id: str) -> StoredHeads:
    """Open published heads; weights are read later.

    Raises:
      UserError: no heads in a known layout, or unreadable.
    """
    folder = path = _local(path_or_id)
    if os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        tensors = tensor_files.open_weights(path)
    elif path := _first(folder, SAFE + TORCH):
        tensors = tensor_files.open_weights(path)
    elif path := tensor_files.weights_file(folder):
        tensors = tensor_files.open_checkpoint(folder)
    else:
        raise _no_heads(path_or_id, folder)
    config = optional_json(os.path.join(folder, "config.json"))
    tensors = rename(tensors, lambda key: WRAPPER.sub("", key))
    for layout in LAYOUTS:
        if layout.fits(tensors):
            return layout.open_heads(path, folder, tensors, config)
    raise _no_heads(path_or_id, folder)


def _local(path_or_id: str) -> str:
    """A local file or directory; downloads only the needed files."""
    if os.path.exists(path_or_id):
        return path_or_id
    for names in (SAFE, TORCH):
        folder = resolve(path_or_id, [*DESCRIPTIONS, *names])
        if _first(folder, names):
            return folder
    return resolve(path_or_id)


def _first(folder: str, names: list[str]) -> str:
    """The path of the first file that exists, "" if none does."""
    paths = (os.path.join(folder, name) for name in names)
    return next((path for path in paths if os.path.isfile(path)), "")


def _no_heads(path_or_id: str, folder: str) -> UserError:
    inside = os.path.join(folder, "heads")
    if os.path.isfile(os.path.join(inside, DESCRIPTION)):
        return UserError(
            f"{path_or_id} holds a model with its heads: give --drafter {inside}"
        )
    if os.path.isfile(os.path.join(folder, "config.json")):
        return UserError(
            f"{path_or_id} holds a model, not draft heads: give it to --model, and --drafter {KNOWN}"
        )
    return UserError(f"{path_or_id} holds no draft heads: --drafter takes {KNOWN}")
