"""Draft heads for other engines: one directory in the layout that each of them loads, with a model card.

Engines fail silently where a key or a field is wrong (they drop unknown keys and leave the rest random), so
the tests read every layout back by a strict re-implementation of its loader. docs/formats.md lists keys, fields
and known pitfalls.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

from flax.traverse_util import unflatten_dict

from medusa_jax.errors import UserError
from medusa_jax.formats.eagle3_files import to_eagle3, to_speculators
from medusa_jax.formats.eagle_files import to_eagle
from medusa_jax.formats.export import Export
from medusa_jax.formats.hydra_files import to_hydra
from medusa_jax.formats.medusa_files import (
    ADAPTER,
    to_tensorrt_llm,
    to_tgi,
    to_tgi_shared,
    to_vllm,
)
from medusa_jax.formats.merge import to_merged
from medusa_jax.formats.model_card import model_card
from medusa_jax.heads import vocabulary
from medusa_jax.interop.heads_io import check_base
from medusa_jax.interop.own_heads import base_record, save_heads
from medusa_jax.interop.tensors import optional_json
from medusa_jax.interop.tokenizer_files import copy_inside
from medusa_jax.whole_files import Json, write_text


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


class Target(NamedTuple):
    """A layout to write.

    Attributes:
      write: (heads, new directory) writes it.
      purpose: who reads it.
      loading: how to load the directory {out}, with {heads} heads of {layers} layers, for the model {base}.
      draft_vocab: the layout can say which tokens the heads score.
    """

    write: Callable[[Export, str], None]
    purpose: str
    loading: str
    draft_vocab: bool = False


# By the value of --to.
TARGETS = {
    "native": Target(
        to_native,
        "this project's format, bound to the model by its fingerprint",
        "`python decode.py --model {base} --drafter {out}`",
        draft_vocab=True,
    ),
    "tgi": Target(
        to_tgi,
        "TGI, and vLLM from 0.28 on",
        "TGI: `--model-id {out} --speculate {heads}` (the base model must be in the cache or "
        'a local directory). vLLM from 0.28 on: `speculative_config={{"method": "medusa", "model": '
        '"{out}", "num_speculative_tokens": {heads}}}`',
    ),
    "tgi_shared": Target(
        to_tgi_shared,
        "TGI, heads that share the model's LM head",
        "TGI: `--model-id {out} --speculate {heads}`",
    ),
    "vllm": Target(
        to_vllm,
        "any vLLM that has Medusa; EAGLE-3 heads as in speculators",
        '`speculative_config={{"method": "medusa", "model": "{out}", '
        '"num_speculative_tokens": {heads}}}`. With more tokens than heads, random weights '
        "would draft the rest without a warning",
        draft_vocab=True,
    ),
    "tensorrt_llm": Target(
        to_tensorrt_llm,
        "TensorRT-LLM up to 1.1, and Medusa's own code",
        "TensorRT-LLM up to 1.1: `--medusa_model_dir {out} --num_medusa_heads {heads} "
        "--num_medusa_layers {layers}`",
    ),
    "merged": Target(
        to_merged,
        "model and heads as one Hugging Face model (Medusa v1.0)",
        "`python decode.py --model {out} --drafter {out}`; the repository of Medusa's "
        "authors loads it by path",
    ),
    "hydra": Target(
        to_hydra, "Hydra's own code", "`HydraModel.from_pretrained` of the authors' code"
    ),
    "eagle": Target(
        to_eagle,
        "EAGLE's own code",
        "`EaModel.from_pretrained` of the authors' code, as its `ea_model_path`",
    ),
    "eagle3": Target(
        to_eagle3,
        "EAGLE-3 in SGLang, vLLM and EAGLE's own code",
        'vLLM: `speculative_config={{"method": "eagle3", "model": "{out}", '
        '"num_speculative_tokens": 4}}`; SGLang: `--speculative-algorithm EAGLE3 '
        "--speculative-draft-model-path {out}`",
        draft_vocab=True,
    ),
    "speculators": Target(
        to_speculators,
        "EAGLE-3 in vLLM and speculators",
        "`vllm serve {out}`, which serves the base model with these heads",
        draft_vocab=True,
    ),
}


def convert(
    export: Export,
    target: str,
    out: str,
    *,
    bench: Json | None = None,
    allow_other_base: bool = False,
) -> None:
    """Write heads in the layout of `target` into the new directory `out`.

    Args:
      target: a key of `TARGETS`.
      bench: the race.json of `bench race`, for the model card.
      allow_other_base: as for `load_heads`.

    Raises:
      UserError: `out` is not empty; heads that the target does not support or that belong to another backbone;
        unreadable or unwritable files.
    """
    if target == "vllm" and export.stored.heads.drafter == "eagle3":
        target = "speculators"
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        # Engines load every file of weights in the directory.
        raise UserError(f"{out} is not empty: give --out a new directory")
    stored, row = export.stored, TARGETS[target]
    if not (target == "merged" and stored.layout == ADAPTER):
        fingerprint = None if allow_other_base else export.base.fingerprint()
        check_base(stored, export.base.config, fingerprint, allow_other_base)
    # Heads that share the backbone's LM head can score all tokens.
    if (
        stored.heads.draft_vocab
        and not row.draft_vocab
        and stored.heads.lm_head != "shared"
    ):
        able = ", ".join(name for name, row in TARGETS.items() if row.draft_vocab)
        raise UserError(
            f"{stored.source} scores a draft vocabulary of {stored.heads.draft_vocab} tokens, "
            f"which these layouts alone can express: --to {able}"
        )
    row.write(export, out)
    tree = optional_json(os.path.join(stored.directory, "tree.json"))
    name = os.path.basename(os.path.normpath(out))
    card = model_card(export, row.loading, name, tree, bench)
    write_text(os.path.join(out, "README.md"), card)
