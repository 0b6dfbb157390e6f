"""Draft heads for other engines: one directory in the layout that each of them loads, with a model card.

Engines fail silently where a key or a field is wrong (they drop unknown keys and leave the rest random), so
the tests read every layout back by a strict re-implementation of its loader. docs/formats.md lists keys, fields
and known pitfalls.
"""

import os
from collections.abc import Callable
from functools import partial

from flax.traverse_util import unflatten_dict

from medusa_jax.errors import UserError
from medusa_jax.formats import dflash_files
from medusa_jax.formats.eagle3_files import to_eagle3, to_speculators
from medusa_jax.formats.eagle_files import to_eagle, to_eagle_engine
from medusa_jax.formats.engines import TARGETS, why_not
from medusa_jax.formats.export import Export
from medusa_jax.formats.hydra_files import to_hydra
from medusa_jax.formats.medusa_files import to_tensorrt_llm, to_tgi, to_tgi_shared, to_vllm
from medusa_jax.formats.merge import to_merged
from medusa_jax.formats.model_card import model_card
from medusa_jax.heads import vocabulary
from medusa_jax.interop.heads_io import check_base
from medusa_jax.interop.own_heads import base_record, save_heads
from medusa_jax.interop.tensors import optional_json
from medusa_jax.interop.tokenizer_files import copy_inside
from medusa_jax.whole_files import write_text


def to_native(export: Export, out: str) -> None:
    """Write this project's format, with the fingerprint of the backbone and the tree, if any."""
    stored = export.stored
    base = base_record(export.base.config, export.base.fingerprint())
    recipe = stored.meta.get("recipe")
    if not isinstance(recipe, dict):
        recipe = {"converted_from": stored.layout, "config": stored.meta}
    params = unflatten_dict(export.params, sep="/")
    if stored.ids is not None:
        params[vocabulary.GROUP] = {"ids": stored.ids}
    dtype = export.dtype or None
    save_heads(out, stored.heads, params, base=base, recipe=recipe, dtype=dtype)
    copy_inside(stored.directory, "tree.json", out)


# By target, or target and drafter.
WRITERS: dict[str, Callable[[Export, str], None]] = {
    "native": to_native,
    "vllm": to_vllm,
    "vllm eagle": partial(to_eagle_engine, engine="vllm"),
    "sglang eagle": partial(to_eagle_engine, engine="sglang"),
    "tgi": to_tgi,
    "tgi_shared": to_tgi_shared,
    "tensorrt_llm": to_tensorrt_llm,
    "merged": to_merged,
    "hydra": to_hydra,
    "eagle": to_eagle,
    "eagle3": to_eagle3,
    "dflash": dflash_files.to_dflash,
    "speculators": to_speculators,
    "speculators dflash": dflash_files.to_speculators,
    "speculators dspark": dflash_files.to_speculators,
}


def convert(export: Export, target: str, out: str, allow_other_base: bool = False) -> str:
    """Write heads in the layout of `target` into the new directory `out`.

    Args:
      target: a key of `engines.TARGETS`.
      allow_other_base: as for `load_heads`.

    Returns: the target whose layout was written, another one where engines read the same directory.

    Raises:
      UserError: `out` is not empty; heads that the target does not support or that belong to another backbone;
        unreadable or unwritable files.
    """
    stored, base = export.stored, export.base.config
    drafter = stored.heads.drafter
    target = TARGETS[target].instead.get(drafter, target)
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        # Engines load every file of weights in the directory.
        raise UserError(f"{out} is not empty: give --out a new directory")
    fingerprint = None if allow_other_base else export.base.fingerprint()
    check_base(stored, base, fingerprint, allow_other_base)
    if reason := why_not(stored.heads, target, base):
        raise UserError(f"{stored.source}: {reason}")
    write = WRITERS.get(f"{target} {drafter}") or WRITERS[target]
    write(export, out)
    row, tree = TARGETS[target], optional_json(os.path.join(stored.directory, "tree.json"))
    loading = row.loading_eagle if drafter == "eagle" and row.loading_eagle else row.loading
    name = os.path.basename(os.path.normpath(out))
    write_text(os.path.join(out, "README.md"), model_card(export, loading, name, tree))
    return target
