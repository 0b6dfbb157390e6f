"""Locate a model and its heads: names, directories, files, hub ids and files of the package."""

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.files import known
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.hf_config import read_config
from medusa_jax.files.hub import resolve
from medusa_jax.files.known import KnownModel, named_model
from medusa_jax.files.layouts.heads_io import open_heads
from medusa_jax.files.layouts.stored_heads import StoredHeads
from medusa_jax.heads.names import BASELINES, DRAFTERS, is_module_class, split_drafter
from medusa_jax.heads.registry import drafter_class, is_baseline

DEMO = Path(__file__).parents[1] / "demo"
MODELS = Path(__file__).parents[1] / "models"


def name_of(model: str | None) -> str:
    """The name of a model: its name or hub id, or a path without its folder."""
    if model and os.path.exists(model):
        return os.path.basename(os.path.abspath(model))
    return model or "demo"


def default_drafter(model: str | None) -> str:
    """The default heads of a model: those bundled with the demo, its name or its weights, or "none"."""
    if model is None:
        return "hydra"
    row = _row(model)
    return row.drafter if row and (MODELS / row.heads / row.drafter).is_dir() else "none"


def bundled_heads(model: str | None) -> list[str]:
    """Names of the drafters whose heads are bundled with the demo (None) or a model."""
    folder = _bundle(model)
    return [name for name in DRAFTERS if folder and (folder / name).is_dir()]


def bundled_draft_model(model: str | None) -> str:
    """The directory of the draft model bundled with a model, "" without one."""
    folder = _bundle(model)
    directory = folder and folder / "draft_model"
    return str(directory) if directory and directory.is_dir() else ""


def _bundle(model: str | None) -> Path | None:
    """The directory of heads bundled with the demo (None) or with a model."""
    row = _row(model)
    return MODELS / row.heads if row else None if model else DEMO


def _row(model: str | None) -> KnownModel | None:
    """The row of a name, or of the weights at a path or hub id; None for the demo and for other models."""
    if model is None:
        return None
    return named_model(model) or _row_of_weights(model)


@lru_cache(maxsize=8)
def _row_of_weights(path_or_id: str) -> KnownModel | None:
    """The row of a model's weights, which are opened only if a row has their shape."""
    directory = resolve(path_or_id)
    config = read_config(directory)
    shape = config.n_layers, config.d_model, config.vocab_size
    rows = {row.norm: row for row in known.KNOWN if row.shape == shape}
    return rows.get(BaseFiles.open(directory).norm_digest()) if rows else None


def find_model(model: str | None) -> str:
    """The directory of the backbone; None is the demo's.

    Raises:
      UserError: the model cannot be found.
    """
    if model is not None:
        return resolve(model)
    if not (DEMO / "backbone" / "config.json").exists():
        raise UserError("this installation has no demo model: give --model")
    return str(DEMO / "backbone")


def find_heads(model: str | None, drafter: str) -> StoredHeads | None:
    """A description of the heads that `drafter` names, without reading them; None for "none".

    Raises:
      UserError: the heads cannot be found.
    """
    if drafter == "none":
        return None
    name, path = split_drafter(drafter)
    if is_module_class(name) and not os.path.exists(drafter):
        drafter_class(name)  # imported here, so that heads.json may name it
        if not path:
            raise UserError(f"give the directory of its heads: --drafter {name}:PATH")
        return open_heads(path)
    if is_baseline(name):
        raise UserError(f"--drafter {drafter}: {name} has no heads")
    if drafter not in DRAFTERS:
        if "/" not in drafter and not os.path.exists(drafter):
            names = [*DRAFTERS, *BASELINES, "none"]
            raise UserError(
                f"there is no drafter {drafter!r}: give a directory, a file, a hub id or one of "
                f"{', '.join(names)}{did_you_mean(name, names)}"
            )
        return open_heads(drafter)
    row = _row(model)
    if model is not None and row is None:
        raise UserError(
            f"--drafter {drafter}: no heads are bundled with the weights of {model}: give "
            "the directory, file or hub id of heads trained for it, or --drafter none"
        )
    folder = (MODELS / row.heads if row else DEMO) / drafter
    if not folder.is_dir():
        raise UserError(
            f"no {drafter} heads are bundled with {model or 'the demo'}: give --drafter the "
            "directory of heads trained for it"
        )
    return replace(open_heads(str(folder)), trained_on=row.trained_on if row else "")
