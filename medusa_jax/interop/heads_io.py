"""Draft heads on disk, in the project's own format: one directory with two files.

`heads.safetensors` holds the parameters under their tree paths ("heads_0/layers_0/kernel"),
shaped as in the tree, and the ids of a draft vocabulary as int32 under "draft_vocab/ids". `heads.json` says what they are: {"format": 1, "heads": {the fields of
the drafter's Config}, "base": {"d_model", "vocab_size", "fingerprint"}, "recipe": {anything}}.
"""

import dataclasses
import os
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import Backbone, drafter_class, make_drafter, vocabulary
from medusa_jax.interop import hf
from medusa_jax.interop import tensors as tensor_files
from medusa_jax.interop.hub import HEAD_FILES, resolve
from medusa_jax.interop.tensor import Tensors
from medusa_jax.interop.tensors import read_json
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.sharding import replicated

Params = dict[str, Any]

FORMAT = 1
WEIGHTS = "heads.safetensors"
DESCRIPTION = "heads.json"
IDS = f"{vocabulary.GROUP}/ids"


def describe_base(config: LlamaConfig, params: Params) -> dict[str, Any]:
    """The `base` record of `save_heads` for a backbone (stored, unfused parameters)."""
    return base_record(config, hf.fingerprint(config, params))


def base_record(config: LlamaConfig, fingerprint: str) -> dict[str, Any]:
    """The same where the fingerprint was taken while the backbone was read."""
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
    base: dict[str, Any],
    recipe: dict[str, Any],
    dtype: Any = None,
) -> None:
    """Write heads, each of the two files atomically.

    Args:
      base: `describe_base` of the backbone that the heads were trained on.
      recipe: whatever says how they came about; JSON values.
      params: with the ids under "draft_vocab", where there is a draft vocabulary.
      dtype: stored type; None keeps that of `params`. Ids stay ids.

    Raises:
      UserError: the directory cannot be written.
    """
    for name in ("d_model", "vocab_size", "fingerprint"):
        if name not in base:
            raise ValueError(f"base lacks {name!r}")
    flat = tensor_files.flatten({k: v for k, v in params.items() if k != vocabulary.GROUP})
    arrays = {name: tensor_files.host_array(leaf, dtype) for name, leaf in flat.items()}
    if heads.draft_vocab:
        ids = tensor_files.host_array(params[vocabulary.GROUP]["ids"], "int32")
        vocabulary.check_ids(ids, heads, base["vocab_size"], directory)
        arrays[IDS] = ids
    description = {
        "format": FORMAT,
        "heads": dataclasses.asdict(heads),
        "base": base,
        "recipe": recipe,
    }
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise UserError(f"{directory} cannot be created: {error.strerror}") from error
    weights = os.path.join(directory, WEIGHTS)
    tensor_files.save_safetensors(weights, arrays, {"format": "medusa_jax.heads"})
    tensor_files.save_json(os.path.join(directory, DESCRIPTION), description)


def load_heads(
    path: str,
    llama: LlamaConfig,
    mesh: Mesh,
    n_heads: int | None = None,
    dtype: Any = "float32",
    *,
    fingerprint: str | None = None,
    allow_other_base: bool = False,
    convert: tensor_files.Convert | None = None,
) -> tuple[HeadsConfig, Params, dict[str, Any]]:
    """Read heads for a backbone of shape `llama`, placed on the mesh.

    Args:
      path: a directory that `save_heads` wrote, or the hub id of such.
      n_heads: read only the first so many; the deeper ones are never touched. Heads that
        need each other (`Drafter.separable`) are all read.
      fingerprint: of the backbone at hand (`hf.fingerprint`); None compares sizes only.
      allow_other_base: accept heads trained on another backbone of the same sizes.
      convert: what becomes of each head before the next is read.

    Returns: (their configuration, parameters, the whole of heads.json). The ids of a draft
    vocabulary lie among the parameters, under "draft_vocab".

    Raises:
      UserError: unreadable; another format; made for another width, vocabulary or backbone;
        keys that contradict heads.json.
    """
    directory = resolve(path, HEAD_FILES)
    description = os.path.join(directory, DESCRIPTION)
    meta = read_json(description)
    stored, base = _read_description(description, meta)
    ours = {"d_model": llama.d_model, "vocab_size": llama.vocab_size}
    theirs = {name: base.get(name) for name in ours}
    if theirs != ours:
        raise UserError(
            f"the heads in {directory} were made for width {theirs['d_model']} and vocabulary "
            f"{theirs['vocab_size']}, the model has width {ours['d_model']} and vocabulary "
            f"{ours['vocab_size']}"
        )
    trained_on = base.get("fingerprint")
    if fingerprint not in (None, trained_on) and not allow_other_base:
        raise UserError(
            f"the heads in {directory} were trained on the model with fingerprint {trained_on}, "
            f"this one has {fingerprint}; allow_other_base (--allow_other_base) uses them all the same"
        )
    weights = os.path.join(directory, WEIGHTS)
    tensors = tensor_files.open_safetensors(weights)
    drafter = make_drafter(stored, llama)
    _check_counts(weights, tensors, stored, drafter.stored_layers)
    if n_heads is not None and not 1 <= n_heads <= stored.n_heads:
        raise UserError(
            f"{directory} holds {stored.n_heads} heads, {n_heads} were asked for (is the tree "
            "deeper than the heads?)"
        )
    few = n_heads if n_heads and drafter.separable else stored.n_heads
    heads = dataclasses.replace(stored, n_heads=few)

    def too_deep(name: str) -> bool:
        match = re.match(r"heads_(\d+)/", name)
        return match is not None and heads.n_heads <= int(match[1]) < stored.n_heads

    ids = _ids(weights, tensors, stored, llama.vocab_size)
    params = tensor_files.load_tree(
        abstract_heads(heads, llama), mesh, tensors, _same_name, dtype, weights, too_deep,
        convert,
    )  # fmt: skip
    if ids is not None:
        params[vocabulary.GROUP] = {"ids": jax.device_put(ids, replicated(mesh))}
    return heads, params, meta


def read_description(path: str) -> HeadsConfig:
    """What `heads.json` says that a directory holds; no weights are read.

    Raises:
      UserError: unreadable, or another format.
    """
    file = os.path.join(path, DESCRIPTION)
    return _read_description(file, read_json(file))[0]


def read_draft_vocab(path: str) -> np.ndarray | None:
    """The ids of the draft vocabulary of heads in a directory; None where they score all tokens.

    Raises:
      UserError: unreadable; ids that are missing, or not what heads.json says.
    """
    file = os.path.join(path, DESCRIPTION)
    stored, base = _read_description(file, read_json(file))
    weights = os.path.join(path, WEIGHTS)
    tensors = tensor_files.open_safetensors(weights)
    return _ids(weights, tensors, stored, base.get("vocab_size", 0))


def _ids(
    weights: str, tensors: Tensors, stored: HeadsConfig, vocab_size: int
) -> np.ndarray | None:
    """Takes the ids out of the tensors of a file; they are no parameter."""
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
    ids = tensor.read(tuple(slice(0, n) for n in tensor.shape))
    vocabulary.check_ids(ids, stored, vocab_size, weights)
    return ids


def abstract_heads(heads: HeadsConfig, llama: LlamaConfig) -> Any:
    """Shapes of a drafter's parameters, nothing computed."""
    drafter = make_drafter(heads, llama)

    def init(key: jax.Array) -> Any:
        backbone = Backbone(Llama(llama), init_params(llama, key))
        return drafter.init(key, vocabulary.stand_in(backbone, heads))

    return jax.eval_shape(init, jax.random.key(0))


def _same_name(path: str) -> tuple[str, bool]:
    return path, False


def _read_description(
    file: str, meta: dict[str, Any]
) -> tuple[HeadsConfig, dict[str, Any]]:
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
            raise UserError(f"{file} has an unknown field {name!r} under heads")
        kind = known[name]
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise UserError(
                f"{file}: heads.{name} should be {kind.__name__}, not {value!r}"
            )
    return kind_of_heads(**fields), base


def _check_counts(
    weights: str, tensors: Tensors, stored: HeadsConfig, n_layers: int
) -> None:
    """Heads and layers are counted in the keys; heads.json may only agree."""
    heads = {int(m[1]) for name in tensors if (m := re.match(r"heads_(\d+)/", name))}
    if heads and len(heads) != stored.n_heads:
        raise UserError(
            f"{weights} holds {len(heads)} heads, {DESCRIPTION} says {stored.n_heads}"
        )
    layers = {
        int(m[1]) for name in tensors if (m := re.match(r"heads_0/layers_(\d+)/", name))
    }
    if layers and len(layers) != n_layers:
        raise UserError(
            f"{weights} holds {len(layers)} layers per head, {DESCRIPTION} says {n_layers}"
        )
