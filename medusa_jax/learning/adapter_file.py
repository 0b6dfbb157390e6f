"""Save and load an adapter; its file never contains text."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from medusa_jax.errors import UserError
from medusa_jax.files.fingerprint import sample_bytes
from medusa_jax.files.tensor import read_whole
from medusa_jax.files.tensors import open_safetensors, save_safetensors
from medusa_jax.sharding import Params


def mark_of(fingerprint: str, heads: Params) -> np.ndarray:
    """A digest of heads and their model, from a sample of the weights."""
    parts = [fingerprint.encode(), *map(sample_bytes, jax.tree.leaves(heads))]
    return np.frombuffer(hashlib.sha256(b"".join(parts)).digest(), np.int64)


def save(file: Path, factors: Params, facts: Mapping[str, float], mark: np.ndarray) -> None:
    """Write an adapter of the heads with this mark, and facts about it; a kill leaves the older file.

    Raises:
      UserError: it cannot be written.
    """
    rest = {name: np.float64(value) for name, value in facts.items()}
    flat = flatten_dict(factors | {"facts": rest, "mark": mark}, sep="/")
    save_safetensors(str(file), {n: np.asarray(x) for n, x in flat.items()}, {})


def read(file: Path, like: Params, mark: np.ndarray) -> tuple[Params, dict[str, float]]:
    """Read an adapter with the shapes of `like`, and the facts.

    Raises:
      UserError: it cannot be read, or belongs to other heads.
    """
    flat = {name: read_whole(x) for name, x in open_safetensors(str(file)).items()}
    found = unflatten_dict(flat, sep="/")
    facts, found_mark = found.pop("facts", {}), found.pop("mark", None)
    fits = jax.tree.map(np.shape, found) == jax.tree.map(np.shape, like)
    if not (fits and np.array_equal(found_mark, mark)):
        raise UserError(
            f"{file} belongs to other heads: delete it, or name another directory"
        )
    return found, {name: value.item() for name, value in facts.items()}
