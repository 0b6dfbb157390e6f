"""Draft heads in this project's format, a directory with two files: read and written.

`heads.safetensors` has the parameters under their tree paths ("heads_0/layers_0/kernel"), shaped as in the tree
(kernels perhaps as int8, `codes.py`), and the ids of a draft vocabulary as int32 under "draft_vocab/ids".
`heads.json` describes them: {"format": 1, "heads": {the fields of the drafter's Config}, "base": {"d_model",
"vocab_size", "fingerprint"}, "recipe": {anything}}. docs/formats.md lists fields and keys.
"""

import dataclasses
import os
from contextlib import suppress

import numpy as np
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError, one_of
from medusa_jax.files.json_files import optional_json, read_json
from medusa_jax.files.layouts import codes
from medusa_jax.files.layouts.stored_heads import StoredHeads, check_ids
from medusa_jax.files.source import flatten
from medusa_jax.files.tensor import read_whole
from medusa_jax.files.tensors import open_safetensors, save_safetensors
from medusa_jax.heads import vocabulary
from medusa_jax.heads.registry import stored_drafter_class
from medusa_jax.sharding import Params
from medusa_jax.typed import Fields, field_value
from medusa_jax.whole_files import Json, write_json

# `StoredHeads.layout`, and `NativeFiles.name`.
NATIVE = "native"
FORMAT = 1
WEIGHTS = "heads.safetensors"
DESCRIPTION = "heads.json"
IDS = f"{vocabulary.GROUP}/ids"
# In a subdirectory, since engines load every safetensors file next to the weights (`evaluate/certificate.py`).
CERTIFICATE = os.path.join("certificate", "certificate.safetensors")


def open_native(directory: str) -> StoredHeads:
    """Open heads that `save_heads` wrote.

    Raises:
      UserError: unreadable, another format, or no whole record of the backbone.
    """
    file = os.path.join(directory, DESCRIPTION)
    meta = read_json(file)
    heads, base = _read_description(file, meta)
    weights = os.path.join(directory, WEIGHTS)
    tensors = open_safetensors(weights)
    ids = None
    if heads.draft_vocab:
        if IDS not in tensors or tensors[IDS].dtype != "int32":
            raise UserError(f"key {IDS!r} in int32 is missing from {weights}")
        ids = read_whole(tensors.pop(IDS))
    return StoredHeads(
        source=weights, directory=directory, layout=NATIVE, heads=heads, meta=meta, base=base, ids=ids,
        tensors=codes.decode(tensors, weights), locate=lambda path: (path, False),
    )  # fmt: skip


def _read_description(file: str, meta: Json) -> tuple[HeadsConfig, Json]:
    if meta.get("format") != FORMAT:
        raise UserError(
            f"{file} has format {meta.get('format')!r}, this version reads {FORMAT}"
        )
    fields, base = (Fields(file, meta).table(name) for name in ("heads", "base"))
    backbone = Fields(f"{file}: base", base)
    backbone.count("d_model")
    backbone.count("vocab_size")
    backbone.text("fingerprint")
    kind_of_heads = stored_drafter_class(str(fields.get("drafter")), file).Config
    heads = kind_of_heads()
    for name, value in fields.items():
        one_of(f"{file}: a field under heads", name, vars(heads))
        fields[name] = field_value(heads, name, value, f"{file}: heads.{name}")
    return kind_of_heads(**fields), base


def base_record(config: LlamaConfig, fingerprint: str) -> Json:
    """The `base` record of `save_heads`, for a backbone with this fingerprint (`fingerprint.py`)."""
    return {
        "d_model": config.d_model,
        "vocab_size": config.vocab_size,
        "fingerprint": fingerprint,
    }


def save_heads(
    directory: str,
    heads: HeadsConfig,
    params: Params,
    *,
    base: Json,
    recipe: Json,
    dtype: DTypeLike | None = None,
) -> None:
    """Write heads, each of the two files atomically. What was measured of other heads in the directory goes.

    Every process of a run must call this, since arrays are gathered; process 0 writes.

    Args:
      base: `base_record` of the backbone that the heads were trained on.
      recipe: how the heads were trained; JSON values.
      params: with the ids of a draft vocabulary, if any, under "draft_vocab".
      dtype: stored type; None keeps that of `params`; "int8" is for kernels, other arrays are bfloat16 then
        (`codes.py`).

    Raises:
      UserError: the directory cannot be written.
    """
    from medusa_jax.hosts import first, on_host  # here: readers need no hosts

    flat = flatten({k: v for k, v in params.items() if k != vocabulary.GROUP})
    arrays = {name: on_host(leaf) for name, leaf in flat.items()}
    if np.dtype(dtype or "float32") == np.int8:
        arrays = codes.encode(arrays)
    elif dtype is not None:
        arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    if heads.draft_vocab:
        ids = on_host(params[vocabulary.GROUP]["ids"]).astype(np.int32)
        check_ids(ids, heads, base["vocab_size"], directory)
        arrays[IDS] = ids
    if not first():
        return
    description = {
        "format": FORMAT,
        "heads": dataclasses.asdict(heads),
        "base": base,
        "recipe": recipe,
    }
    weights = os.path.join(directory, WEIGHTS)
    if os.path.isfile(weights) and not _holds(weights, arrays):
        _drop_measured(directory)
    save_safetensors(weights, arrays, {"format": "medusa_jax.heads"})
    write_json(os.path.join(directory, DESCRIPTION), description)


def _holds(weights: str, arrays: dict[str, np.ndarray]) -> bool:
    """Whether a file has these very arrays."""
    with suppress(UserError):  # a damaged file
        stored = open_safetensors(weights)
        return stored.keys() == arrays.keys() and all(
            read_whole(stored[name]).tobytes() == x.tobytes() for name, x in arrays.items()
        )
    return False


def _drop_measured(directory: str) -> None:
    """Remove the certificate next to heads and the figures of their tree file, whose tree any heads can use."""
    with suppress(OSError):  # there is none, or another file is next to it
        os.remove(file := os.path.join(directory, CERTIFICATE))
        os.rmdir(os.path.dirname(file))
    file = os.path.join(directory, "tree.json")
    with suppress(UserError):  # a list of choices
        tree = optional_json(file)
        if tree.pop("evidence", None):
            write_json(file, tree)
            inform(f"{file} was fitted to other heads: its tree is kept, without figures")
