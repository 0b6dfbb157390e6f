"""Find, recognise and load draft heads of any layout.

A path is a directory, a file of weights in it, or a hub id. Heads with a heads.json are this project's; the keys of
the weights determine the layout of others (`registry.py`).
"""

import dataclasses
import os

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError, between
from medusa_jax.files.hub import HEAD_FILES, resolve
from medusa_jax.files.layouts.native_heads import DESCRIPTION, WEIGHTS, open_native
from medusa_jax.files.layouts.stored_heads import StoredHeads, abstract_heads, check_ids
from medusa_jax.files.source import Convert, flatten
from medusa_jax.heads import vocabulary
from medusa_jax.heads.registry import make_drafter
from medusa_jax.sharding import Params, replicated
from medusa_jax.whole_files import Json


def open_heads(path_or_id: str) -> StoredHeads:
    """Open the draft heads in a directory, a file or a hub repository; weights are read later.

    Raises:
      UserError: no heads in a known layout, or unreadable.
    """
    path = path_or_id
    if not os.path.exists(path):
        path = resolve(path_or_id, HEAD_FILES)
    names = (DESCRIPTION, WEIGHTS)
    folder = os.path.dirname(path) or "." if os.path.basename(path) in names else path
    if any(os.path.isfile(os.path.join(folder, name)) for name in names):
        return open_native(folder)
    from medusa_jax.files.layouts.published import open_published  # only for such files

    return open_published(path_or_id)


def load_heads(
    path: str | StoredHeads,
    llama: LlamaConfig,
    mesh: Mesh,
    n_heads: int | None = None,
    dtype: DTypeLike = "float32",
    *,
    fingerprint: str | None = None,
    convert: Convert | None = None,
) -> tuple[HeadsConfig, Params, Json]:
    """Read heads for a backbone of shape `llama`, placed on the mesh.

    Args:
      path: a directory written by `native_heads.save_heads`, published heads, the hub id of either, or the
        result of `open_heads`.
      n_heads: read only the first `n_heads` heads, if heads can be dropped (`Drafter.separable`).
      fingerprint: of the backbone that the heads must have been trained on (`fingerprint.py`); None: any of the same
        sizes.
      convert: converts each head before the next is read.

    Returns: (their configuration, parameters, contents of heads.json or of published heads' config.json). The
      ids of a draft vocabulary are among the parameters, under "draft_vocab".

    Raises:
      UserError: unreadable; another format; for another width, vocabulary or backbone; keys that contradict the
        description.
    """
    stored = open_heads(path) if isinstance(path, str) else path
    check_base(stored, llama, fingerprint)
    drafter = make_drafter(stored.heads, llama)
    count = stored.heads.n_heads
    if n_heads is not None:
        between(f"the number of heads to read from {stored.directory}", n_heads, 1, count)
    n_read = n_heads if n_heads and drafter.separable else count
    heads = dataclasses.replace(stored.heads, n_heads=n_read)
    abstract = abstract_heads(stored.heads, llama)
    keys = {stored.locate(name)[0] for name in flatten(abstract)}
    if n_read < count:
        abstract = abstract_heads(heads, llama)

    def ignore(key: str) -> bool:
        return key in keys or stored.ignore(key)

    reader = dataclasses.replace(stored, ignore=ignore)
    params = reader.load(abstract, mesh, dtype, convert)
    if stored.ids is not None:
        ids = jax.device_put(stored.ids, replicated(mesh))
        params[vocabulary.GROUP] = {"ids": ids}
    return heads, params, stored.meta


def check_base(stored: StoredHeads, llama: LlamaConfig, fingerprint: str | None) -> None:
    """Refuse heads that were trained on another backbone, as far as their files describe it.

    Args: as for `load_heads`.

    Raises:
      UserError: names the difference.
    """
    base = stored.base
    sizes = {"d_model": llama.d_model, "vocab_size": llama.vocab_size}
    if any(base.get(name, size) != size for name, size in sizes.items()):
        raise UserError(
            f"the heads in {stored.directory} were made for width {base.get('d_model')} and "
            f"vocabulary {base.get('vocab_size')}, the model has width {sizes['d_model']} and "
            f"vocabulary {sizes['vocab_size']}"
        )
    for name, value in stored.layers.items():
        if (ours := getattr(llama.llama_layers(), name)) != value:
            raise UserError(
                f"the layers in {stored.source} were made with {name} {value!r}, the model has "
                f"{ours!r}"
            )
    check_ids(stored.ids, stored.heads, llama.vocab_size, stored.source)
    trained_on = base.get("fingerprint")
    if None not in (fingerprint, trained_on) and fingerprint != trained_on:
        if stored.trained_on:
            inform(
                f"drafts of heads trained on {stored.trained_on}; the text is this model's own"
            )
            return
        raise UserError(
            f"the heads in {stored.directory} were trained on the model with fingerprint "
            f"{trained_on}, this one has {fingerprint}; allow_other_base (--allow_other_base) uses them "
            "anyway"
        )
