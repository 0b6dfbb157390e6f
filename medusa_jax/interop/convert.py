"""Convert draft heads from one layout to another, with a model card."""

import os

from medusa_jax.errors import UserError
from medusa_jax.interop.export_heads import TARGETS, WITH_DRAFT_VOCAB, Export
from medusa_jax.interop.heads_io import check_base
from medusa_jax.interop.medusa_files import ADAPTER
from medusa_jax.interop.model_card import model_card
from medusa_jax.interop.tensors import optional_json
from medusa_jax.whole_files import Json, write_text


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
    if not (target == "merged" and export.stored.layout == ADAPTER):
        fingerprint = None if allow_other_base else export.base.fingerprint()
        check_base(export.stored, export.base.config, fingerprint, allow_other_base)
    if export.stored.heads.draft_vocab and target not in WITH_DRAFT_VOCAB:
        raise UserError(
            f"{export.stored.source} scores a draft vocabulary of "
            f"{export.stored.heads.draft_vocab} tokens, which only --to "
            f"{' and '.join(WITH_DRAFT_VOCAB)} can say"
        )
    TARGETS[target][0](export, out)
    tree = optional_json(os.path.join(export.stored.directory, "tree.json"))
    name = os.path.basename(os.path.normpath(out))
    card = model_card(export, target, name, tree, bench)
    write_text(os.path.join(out, "README.md"), card)
