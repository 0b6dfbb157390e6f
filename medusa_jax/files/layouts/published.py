"""Find published draft heads in a directory, file or hub repository, and recognise them by their keys."""

import os
import re
from functools import partial

from medusa_jax.errors import UserError
from medusa_jax.files.hf_keys import EMBEDDING, WRAPPER
from medusa_jax.files.hub import HEAD_FILES, resolve
from medusa_jax.files.json_files import optional_json
from medusa_jax.files.layouts.layout import HeadFiles
from medusa_jax.files.layouts.native_heads import DESCRIPTION
from medusa_jax.files.layouts.registry import readers
from medusa_jax.files.layouts.stored_heads import StoredHeads
from medusa_jax.files.tensor import Tensors, rename
from medusa_jax.files.tensors import open_weights, weights_file

# In order of preference.
SAFE = [
    "medusa_lm_head.safetensors",
    "hydra_lm_head.safetensors",
    "adapter_model.safetensors",
]
TORCH = ["medusa_lm_head.pt", "hydra_lm_head.pt", "adapter_model.bin"]
# Keys that a model has, and heads do not.
_OF_MODEL = {"model.norm.weight", EMBEDDING}
# Where heads are in a trained backbone, a training's directory and `medusa own`'s.
_PLACES = ("heads", "export", "export/heads", "run/export")
SOURCES = (
    "heads that train.py wrote (heads.json, heads.safetensors), published Medusa, Hydra, EAGLE-1, "
    "EAGLE-3, DFlash or DSpark heads (medusa_lm_head, hydra_lm_head, an adapter, a full model, vLLM's layout)"
)


def open_published(path_or_id: str) -> StoredHeads:
    """Open published heads; weights are read later.

    Raises:
      UserError: no heads in a known layout, or unreadable.
    """
    path = path_or_id
    if not os.path.exists(path):
        path = _downloaded(path_or_id)
    folder, file = path, path
    if os.path.isfile(path):
        folder = os.path.dirname(path) or "."
    else:
        file = _first_file(folder, SAFE + TORCH) or weights_file(folder)
    if not file:
        raise _no_heads(path_or_id, folder, {})
    config = optional_json(os.path.join(folder, "config.json"))
    tensors = rename(open_weights(file), lambda key: WRAPPER.sub("", key))
    for prefix in ("", *_prefixes(tensors)):
        named = rename(tensors, partial(re.sub, prefix, ""))
        for layout in readers():
            if layout.fits(named):
                return layout.open(HeadFiles(file, folder, named, config))
    raise _no_heads(path_or_id, folder, tensors)


def _prefixes(tensors: Tensors) -> list[str]:
    """Patterns of what keys begin with, such as "draft_model." and "eagle3.model.": modules that heads may be in."""
    parts = (key.split(".")[:n] for key in tensors for n in (1, 2, 3))
    found = {".".join(x) + "." for x in parts if not any(map(str.isdigit, x))}
    return [rf"^{re.escape(x)}(?:model\.)?" for x in sorted(found, key=len)]


def _downloaded(repository: str) -> str:
    """The local copy of a repository; only the needed files are fetched."""
    for names in (SAFE, TORCH):
        folder = resolve(repository, [*HEAD_FILES, *names])
        if _first_file(folder, names):
            return folder
    return resolve(repository)


def _first_file(folder: str, names: list[str]) -> str:
    """The path of the first file that exists, "" if none does."""
    paths = (os.path.join(folder, name) for name in names)
    return next((path for path in paths if os.path.isfile(path)), "")


def _no_heads(path_or_id: str, folder: str, tensors: Tensors) -> UserError:
    for inner in _PLACES:
        heads = os.path.join(folder, inner)
        if os.path.isfile(os.path.join(heads, DESCRIPTION)):
            where = "holds draft heads in a directory below"
            return UserError(f"{path_or_id} {where}: give --drafter {heads}")
    if tensors and tensors.keys().isdisjoint(_OF_MODEL):
        keys = ", ".join(map(repr, sorted(tensors)[:3]))
        return UserError(
            f"{path_or_id} has keys of no known draft heads, such as {keys}: --drafter takes {SOURCES}"
        )
    if "model_type" in optional_json(os.path.join(folder, "config.json")):
        return UserError(
            f"{path_or_id} holds a model, not draft heads: give it to --model, and --drafter {SOURCES}"
        )
    return UserError(f"{path_or_id} holds no draft heads: --drafter takes {SOURCES}")
