"""What was learned, in a file: an addition to some heads, never text."""

import hashlib
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


def save(file: Path, addition: Params, facts: np.ndarray, mark: np.ndarray) -> None:
    """Write an addition to the heads with this mark, and facts about it; a kill leaves the older file.

    Raises:
      UserError: it cannot be written.
    """
    flat = flatten_dict(addition | {"facts": facts, "mark": mark}, sep="/")
    save_safetensors(str(file), {n: np.asarray(x) for n, x in flat.items()}, {})


def read(
    file: Path, like: Params, facts: np.ndarray, mark: np.ndarray
) -> tuple[Params, np.ndarray]:
    """Read an addition and facts, in the shapes of `like` and `facts`.

    Raises:
      UserError: it cannot be read, or belongs to other heads.
    """
    flat = {name: read_whole(x) for name, x in open_safetensors(str(file)).items()}
    shapes = {name: x.shape for name, x in flatten_dict(like, sep="/").items()}
    shapes |= {"facts": facts.shape, "mark": mark.shape}
    fits = {name: x.shape for name, x in flat.items()} == shapes
    if not (fits and np.array_equal(flat.pop("mark"), mark)):
        raise UserError(
            f"{file} belongs to other heads: delete it, or name another directory"
        )
    facts = flat.pop("facts")
    return unflatten_dict(flat, sep="/"), facts
