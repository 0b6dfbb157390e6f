"""Draft heads on disk: written in this project's format, read in any known layout.

This project's format is a directory with two files.

`heads.safetensors` has the parameters under their tree paths ("heads_0/layers_0/kernel"), shaped as in the tree
(kernels perhaps as int8, `codes.py`), and the ids of a draft vocabulary as int32 under "draft_vocab/ids".
`heads.json` describes them: {"format": 1, "heads": {the fields of the drafter's Config}, "base": {"d_model",
"vocab_size", "fingerprint"}, "recipe": {anything}}.
"""

import dataclasses
import os

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import make_drafter, vocabulary
from medusa_jax.interop import codes, hf
from medusa_jax.interop import tensors as tensor_files
from medusa_jax.interop.own_heads import DESCRIPTION, FORMAT, IDS, OWN, WEIGHTS
from medusa_jax.interop.published import open_heads
from medusa_jax.interop.stored_heads import StoredHeads, abstract_heads
from medusa_jax.sharding import Params, replicated
from medusa_jax.whole_files import Json


def describe_base(config: LlamaConfig, params: Params) -> Json:
    """The `base` record of `save_heads` for a backbone (stored, unfused parameters)."""
    return base_record(config, hf.fingerprint(config, params))


def base_record(config: LlamaConfig, fingerprint: str) -> Json:
    """The `base` record for a fingerprint taken while the backbone was read."""
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
    write: bool = True,
) -> None:
    """Write heads, each of the two files atomically.

    Args:
      base: `describe_base` of the backbone that the heads were trained on.
      recipe: how the heads were trained; JSON values.
      params: with the ids of a draft vocabulary, if any, under "draft_vocab".
      dtype: stored type; None keeps that of `params`; "int8" is for kernels, the rest is bfloat16 then
        (`codes.py`).
      write: False on processes that only take part in gathering the arrays.

    Raises:
      UserError: the directory cannot be written.
    """
    for name in ("d_model", "vocab_size", "fingerprint"):
        if name not in base:
            raise ValueError(f"base lacks {name!r}")
    flat = tensor_files.flatten({k: v for k, v in params.items() if k != vocabulary.GROUP})
    quantised = np.dtype(dtype or "float32") == np.int8
    kind = "float32" if quantised else dtype
    arrays = {name: tensor_files.host_array(leaf, kind) for name, leaf in flat.items()}
    if quantised:
        arrays = codes.encode(arrays)
    if heads.draft_vocab:
        ids = tensor_files.host_array(params[vocabulary.GROUP]["ids"], "int32")
        vocabulary.check_ids(ids, heads, base["vocab_size"], directory)
        arrays[IDS] = ids
    if not write:
        return
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
    path: str | StoredHeads,
    llama: LlamaConfig,
    mesh: Mesh,
    n_heads: int | None = None,
    dtype: DTypeLike = "float32",
    *,
    fingerprint: str | None = None,
    allow_other_base: bool = False,
    convert: tensor_files.Convert | None = None,
) -> tuple[HeadsConfig, Params, Json]:
    """Read heads for a backbone of shape `llama`, placed on the mesh.

    Args:
      path: a directory written by `save_heads`, published heads (`published.py`), the hub id of either, or the
        result of `open_heads`.
      n_heads: read only the first `n_heads` heads, if heads can be dropped (`Drafter.separable`).
      fingerprint: of the current backbone (`hf.fingerprint`); None compares sizes only.
      allow_other_base: accept heads trained on another backbone of the same sizes.
      convert: converts each head before the next is read.

    Returns: (their configuration, parameters, contents of heads.json or of published heads' config.json). The
      ids of a draft vocabulary are among the parameters, under "draft_vocab".

    Raises:
      UserError: unreadable; another format; for another width, vocabulary or backbone; keys that contradict the
        description.
    """
    stored = open_heads(path) if isinstance(path, str) else path
    check_base(stored, llama, fingerprint, allow_other_base)
    drafter = make_drafter(stored.heads, llama)
    count = stored.heads.n_heads
    if n_heads is not None and not 1 <= n_heads <= count:
        raise UserError(
            f"{stored.directory} holds {count} heads, {n_heads} were asked for (is the tree "
            "deeper than the heads?)"
        )
    n_read = n_heads if n_heads and drafter.separable else count
    heads = dataclasses.replace(stored.heads, n_heads=n_read)
    all_parameters = tensor_files.flatten(abstract_heads(stored.heads, llama))
    known = {stored.locate(name)[0] for name in all_parameters}

    def ignore(key: str) -> bool:
        return key in known or stored.ignore(key)

    params = tensor_files.load_tree(
        abstract_heads(heads, llama), mesh, stored.tensors, stored.locate, dtype,
        stored.source, ignore, convert,
    )  # fmt: skip
    if stored.ids is not None:
        vocabulary.check_ids(stored.ids, stored.heads, llama.vocab_size, stored.source)
        ids = jax.device_put(stored.ids, replicated(mesh))
        params[vocabulary.GROUP] = {"ids": ids}
    return heads, params, stored.meta


def check_base(
    stored: StoredHeads, llama: LlamaConfig, fingerprint: str | None, allow_other: bool
) -> None:
    """Refuse heads that were trained on another backbone, as far as their files describe it.

    Raises:
      UserError: names the difference.
    """
    theirs, ours = stored.base, {"d_model": llama.d_model, "vocab_size": llama.vocab_size}
    if stored.layout == OWN and {name: theirs.get(name) for name in ours} != ours:
        raise UserError(
            f"the heads in {stored.directory} were made for width {theirs.get('d_model')} and "
            f"vocabulary {theirs.get('vocab_size')}, the model has width {ours['d_model']} and "
            f"vocabulary {ours['vocab_size']}"
        )
    for name, value in stored.layers.items():
        if (expected := getattr(llama, name)) != value:
            raise UserError(
                f"the layers in {stored.source} were made with {name} {value!r}, the model has "
                f"{expected!r}"
            )
    if allow_other:
        return
    way_out = "allow_other_base (--allow_other_base) uses them all the same"
    if stored.needs:
        raise UserError(
            f"{stored.source} holds heads and {stored.needs}: merge both into a model with "
            f"`python -m medusa_jax convert --to merged`; {way_out}"
        )
    trained_on = theirs.get("fingerprint")
    unknown = trained_on is None and stored.layout != OWN
    if fingerprint is not None and fingerprint != trained_on and not unknown:
        raise UserError(
            f"the heads in {stored.directory} were trained on the model with fingerprint "
            f"{trained_on}, this one has {fingerprint}; {way_out}"
        )
