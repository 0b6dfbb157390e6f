"""Draft heads on disk, in the project's own format: one directory with two files.

`heads.safetensors` holds the parameters under their tree paths ("heads_0/layers_0/kernel"),
shaped as in the tree. `heads.json` says what they are: {"format": 1, "heads": {the fields of
the drafter's Config}, "base": {"d_model", "vocab_size", "fingerprint"}, "recipe": {anything}}.
"""

import dataclasses
import os
import re
from typing import Any

import jax
from jax.sharding import Mesh

from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import Backbone, drafter_class, make_drafter
from medusa_jax.interop import hf
from medusa_jax.interop import tensors as tensor_files
from medusa_jax.interop.hub import HEAD_FILES, resolve
from medusa_jax.interop.tensor import Tensors
from medusa_jax.interop.tensors import read_json
from medusa_jax.model.llama import Llama, init_params

Params = dict[str, Any]

FORMAT = 1
WEIGHTS = "heads.safetensors"
DESCRIPTION = "heads.json"


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
      dtype: stored type; None keeps that of `params`.

    Raises:
      UserError: the directory cannot be written.
    """
    for name in ("d_model", "vocab_size", "fingerprint"):
        if name not in base:
            raise ValueError(f"base lacks {name!r}")
    flat = tensor_files.flatten(params)
    arrays = {name: tensor_files.host_array(leaf, dtype) for name, leaf in flat.items()}
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

    Returns: (their configuration, parameters, the whole of heads.json).

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

    params = tensor_files.load_tree(
        abstract_heads(heads, llama), mesh, tensors, _same_name, dtype, weights, too_deep,
        convert,
    )  # fmt: skip
    return heads, params, meta


def read_description(path: str) -> HeadsConfig:
    """What `heads.json` says that a directory holds; no weights are read.

    Raises:
      UserError: unreadable, or another format.
    """
    file = os.path.join(path, DESCRIPTION)
    return _read_description(file, read_json(file))[0]


def abstract_heads(heads: HeadsConfig, llama: LlamaConfig) -> Any:
    """Shapes of a drafter's parameters, nothing computed."""
    drafter = make_drafter(heads, llama)

    def init(key: jax.Array) -> Any:
        return drafter.init(key, Backbone(Llama(llama), init_params(llama, key)))

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
