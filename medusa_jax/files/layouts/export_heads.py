"""Draft heads for other engines: one directory in the layout that each of them loads, with a model card.

Engines fail silently where a key or a field is wrong (they drop unknown keys and leave the rest random), so
the tests read every layout back by a strict re-implementation of its loader. docs/formats.md lists keys, fields
and known pitfalls.
"""

import os
from collections.abc import Callable
from functools import partial

import numpy as np
from flax.traverse_util import unflatten_dict

from medusa_jax.errors import UserError
from medusa_jax.files.hf_writer import save_weights
from medusa_jax.files.layouts import dflash_files
from medusa_jax.files.layouts.eagle3_files import to_eagle3, to_speculators
from medusa_jax.files.layouts.eagle_files import to_eagle, to_eagle_engine
from medusa_jax.files.layouts.engines import TARGETS, why_not
from medusa_jax.files.layouts.export import Export
from medusa_jax.files.layouts.heads_io import check_base
from medusa_jax.files.layouts.hydra_files import to_hydra
from medusa_jax.files.layouts.medusa_files import (
    authors_form,
    is_head_key,
    to_tensorrt_llm,
    to_tgi,
    to_tgi_shared,
    to_vllm,
)
from medusa_jax.files.layouts.own_heads import base_record, save_heads
from medusa_jax.files.tensor import cast, whole
from medusa_jax.files.tensors import optional_json, read_json, save_json
from medusa_jax.heads import vocabulary
from medusa_jax.text.tokenizer_files import copy_inside, copy_tokenizer
from medusa_jax.whole_files import Json, replacing, write_text


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


def to_merged(export: Export, out: str) -> None:
    """A full model in Hugging Face format with its heads in it (Medusa v1.0).

    Tensors are copied file to file, a shard at a time, without a device.

    Raises:
      UserError: weights that are not finite in the stored type; the disk is full.
    """
    heads, base, dtype = export.stored.heads, export.base, export.dtype
    arrays = authors_form(heads, "medusa_head.{k}.").arrays(export)
    backbone = {key: t for key, t in base.tensors.items() if not is_head_key(key)}

    def read(key: str) -> np.ndarray:
        array = arrays[key] if key in arrays else whole(backbone[key])
        return cast(array, dtype, repr(key)) if dtype else array

    first = next(iter(backbone.values()))
    kind = np.dtype(dtype or first.dtype)
    shapes = {key: tensor.shape for key, tensor in backbone.items()}
    shapes |= {key: array.shape for key, array in arrays.items()}
    save_weights(out, shapes, read, kind)
    raw = read_json(os.path.join(base.source, "config.json"))
    if raw.get("tie_word_embeddings"):
        raw["tie_word_embeddings"] = base.config.tie_embeddings
    raw["medusa_num_heads"] = heads.n_heads
    raw["medusa_num_layers"] = heads.n_layers
    if dtype:
        raw |= {"torch_dtype": dtype, "dtype": dtype}
    copy_tokenizer("", base.source, out)
    save_json(os.path.join(out, "config.json"), raw)


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
    if not out or (os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out))):
        # Engines load every file of weights in the directory.
        raise UserError(f"{out!r} is not empty: give --out a new directory")
    fingerprint = None if allow_other_base else export.base.fingerprint()
    check_base(stored, base, fingerprint, allow_other_base)
    if reason := why_not(stored.heads, target, base):
        raise UserError(f"{stored.source}: {reason}")
    write = WRITERS.get(f"{target} {drafter}") or WRITERS[target]
    row, tree = TARGETS[target], optional_json(os.path.join(stored.directory, "tree.json"))
    loading = row.loading_eagle if drafter == "eagle" and row.loading_eagle else row.loading
    card = model_card(export, loading, os.path.basename(os.path.normpath(out)), tree)
    with replacing(out) as new:
        write(export, new)
        write_text(os.path.join(new, "README.md"), card)
    return target


def model_card(export: Export, loading: str, out: str, tree: Json) -> str:
    """The text of README.md.

    Args:
      loading: as in `Target`.
      out: its name.
      tree: the tree file of the heads, with its evidence; {} if there is none.
    """
    stored, heads, base = export.stored, export.stored.heads, export.base_name
    on_hub = "/" in base and not os.path.exists(base)
    name = base if on_hub else os.path.basename(os.path.abspath(base))
    count = sum(int(np.prod(x.shape)) for x in export.params.values())
    loading = loading.format(
        base=name, out=out, heads=heads.n_heads, layers=heads.n_layers,
        drafter=heads.drafter, DRAFTER=heads.drafter.upper(),
    )  # fmt: skip
    measured = "\n".join(_held_out(stored.meta) + _fitted(tree) or [NOTHING, ""])
    # The hub refuses a base_model that is not an id.
    id_line = f"base_model: {base}\n" * on_hub
    return f"""---
{id_line}tags:
- speculative-decoding
- {heads.drafter}
---

# Draft heads for {name}

The heads draft tokens and the backbone verifies them: the text is the backbone's.

- kind: {heads.drafter}
- heads: {heads.n_heads}
- layers per head: {heads.n_layers}
- LM heads: {heads.lm_head}
- parameters: {count:,}
- stored in: {export.kind.name}
- backbone: {name}
- read from: {stored.layout}

Loading: {loading}.

## Measured

{measured}
"""


NOTHING = (
    "Nothing yet: no held-out evaluation, fitted tree or benchmark came with these heads. "
    "Accepted length depends on the text; `python -m medusa_jax calibrate` and `bench` measure it."
)


def _held_out(meta: Json) -> list[str]:
    """The trainer's held-out evaluation."""
    recipe = meta.get("recipe")
    found = recipe.get("held_out") if isinstance(recipe, dict) else None
    if not isinstance(recipe, dict) or not isinstance(found, dict):
        return []
    names = ("accepted_length_chain", "accepted_length_tree")
    numbers = ", ".join(f"{name} {found[name]:.3f}" for name in names if name in found)
    return (
        [f"Held-out text, at step {recipe.get('step')}: {numbers}.", ""] if numbers else []
    )


def _fitted(tree: Json) -> list[str]:
    """Head accuracies and trees measured by `calibrate`."""
    evidence = tree.get("evidence")
    if not isinstance(evidence, dict):
        return []
    lines = [
        f"Trees fitted on {tree.get('device')} in {tree.get('dtype')} at batch "
        f"{tree.get('batch')}, temperature {tree.get('temperature')}, {tree.get('date')}, to "
        f"{evidence.get('positions')} positions:",
        "",
        "| nodes | tokens per step | step latency |",
        "|---|---|---|",
    ]
    for row in evidence.get("ladder", []):
        lines.append(
            f"| {row['nodes']} | {row['tokens_per_step']:.2f} | "
            f"{row['step_latency_ratio']:.2f}x |"
        )
    accuracies = ", ".join(f"{row[0]:.3f}" for row in evidence.get("head_accuracies", []))
    if accuracies:
        lines += ["", f"Top-1 accuracies of the heads: {accuracies}."]
    return [*lines, ""]
