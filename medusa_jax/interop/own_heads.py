"""Read this project's format of heads: `heads.json` and `heads.safetensors`.

`heads_io.py` writes it; docs/formats.md lists its fields and keys.
"""

import dataclasses
import os
import re
from typing import Any

import numpy as np

from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.heads import drafter_class, vocabulary
from medusa_jax.interop import codes
from medusa_jax.interop import tensors as tensor_files
from medusa_jax.interop.stored_heads import StoredHeads
from medusa_jax.interop.tensor import Tensors, whole
from medusa_jax.interop.tensors import read_json
from medusa_jax.whole_files import Json

# `StoredHeads.layout`.
OWN = "medusa_jax"
FORMAT = 1
WEIGHTS = "heads.safetensors"
DESCRIPTION = "heads.json"
IDS = f"{vocabulary.GROUP}/ids"


def open_own(directory: str) -> StoredHeads:
    """Open heads that `heads_io.save_heads` wrote.

    Raises:
      UserError: unreadable; another format; the numbers of heads or layers contradict heads.json.
    """
    file = os.path.join(directory, DESCRIPTION)
    meta = read_json(file)
    heads, base = _read_description(file, meta)
    weights = os.path.join(directory, WEIGHTS)
    tensors = tensor_files.open_safetensors(weights)
    ids = _take_ids(weights, tensors, heads, base)
    tensors = codes.decode(tensors, weights)
    _check_counts(weights, tensors, heads)
    return StoredHeads(
        weights,
        directory,
        OWN,
        heads,
        tensors,
        lambda path: (path, False),
        meta=meta,
        base=base,
        ids=ids,
    )


def _take_ids(
    weights: str, tensors: Tensors, stored: HeadsConfig, base: Json
) -> np.ndarray | None:
    """Remove the ids of a draft vocabulary, which is not a parameter, from `tensors`."""
    if not stored.draft_vocab:
        return None
    tensor = tensors.pop(IDS, None)
    if tensor is None:
        raise UserError(
            f"key {IDS!r} is missing from {weights}: {DESCRIPTION} says that the heads score "
            f"{stored.draft_vocab} tokens"
        )
    if tensor.dtype != "int32":
        raise UserError(f"key {IDS!r} in {weights} is {tensor.dtype}, not int32")
    ids = whole(tensor)
    size = base.get("vocab_size")
    if type(size) is not int:
        raise UserError(f"{DESCRIPTION} next to {weights}: base.vocab_size is {size!r}")
    vocabulary.check_ids(ids, stored, size, weights)
    return ids


def _read_description(file: str, meta: Json) -> tuple[HeadsConfig, Json]:
    if meta.get("format") != FORMAT:
        raise UserError(
            f"{file} has format {meta.get('format')!r}, this version reads {FORMAT}"
        )
    fields, base = meta.get("heads"), meta.get("base")
    if not isinstance(fields, dict) or not isinstance(base, dict):
        raise UserError(f'{file} needs the objects "heads" and "base"')
    kind_of_heads = drafter_class(str(fields.get("drafter"))).Config
    known: dict[str, Any] = {
        field.name: field.type for field in dataclasses.fields(kind_of_heads)
    }
    for name, value in fields.items():
        if name not in known:
            near = did_you_mean(name, known)
            raise UserError(f"{file} has an unknown field {name!r} under heads{near}")
        kind = known[name]
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise UserError(
                f"{file}: heads.{name} should be {kind.__name__}, not {value!r}"
            )
    return kind_of_heads(**fields), base


def _check_counts(weights: str, tensors: Tensors, stored: HeadsConfig) -> None:
    """Compare the numbers of heads and layers in the keys with heads.json."""
    # These numbers do not depend on the backbone, so any will do.
    drafter = drafter_class(stored.drafter)(stored, LlamaConfig())
    heads = {int(m[1]) for name in tensors if (m := re.match(r"heads_(\d+)/", name))}
    n_heads, n_layers = drafter.stored_counts
    if len(heads) != n_heads:
        raise UserError(f"{weights} holds {len(heads)} heads, {DESCRIPTION} says {n_heads}")
    layers = {
        int(m[1]) for name in tensors if (m := re.match(r"heads_0/layers_(\d+)/", name))
    }
    if layers and len(layers) != n_layers:
        raise UserError(
            f"{weights} holds {len(layers)} layers per head, {DESCRIPTION} says {n_layers}"
        )
