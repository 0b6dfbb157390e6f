"""Write draft heads in another layout: a directory that an engine loads, with a model card.

Engines fail silently where a key or a field is wrong (they drop unknown keys and leave the rest random), so
the tests read every layout back by a strict re-implementation of its loader. docs/formats.md lists keys, fields
and known pitfalls.
"""

import os
from dataclasses import replace

from medusa_jax.errors import UserError
from medusa_jax.files.layouts.engines import why_not
from medusa_jax.files.layouts.heads_io import check_base
from medusa_jax.files.layouts.layout import Export, Layout
from medusa_jax.files.layouts.model_card import model_card
from medusa_jax.files.layouts.registry import layout_of
from medusa_jax.tree.files import TreeFile
from medusa_jax.whole_files import replacing, write_text


def convert(
    export: Export, target: str, out: str, allow_other_base: bool = False
) -> Layout:
    """Write heads in the layout of `target` into the new directory `out`.

    Args:
      target: a key of `registry.TARGETS`, an entry point of another package, or "module:Class".
      allow_other_base: take heads that were trained on another backbone of the same sizes.

    Returns: the layout that was written; several targets may share one.

    Raises:
      UserError: `out` is not empty; heads that the target does not support or that belong to another backbone;
        unreadable or unwritable files.
    """
    export = replace(export, stored=export.stored.fitted(export.base))
    stored, base = export.stored, export.base.config
    layout = layout_of(target, stored.heads.drafter)
    if not out or (os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out))):
        # Engines load every file of weights in the directory.
        raise UserError(f"{out!r} is not empty: give --out a new directory")
    fingerprint = None if allow_other_base else export.base.fingerprint()
    check_base(stored, base, fingerprint)
    reason = why_not(stored.heads, target, base)
    if layout is None or reason:
        raise UserError(f"{stored.source}: {reason}")
    file = os.path.join(stored.directory, "tree.json")
    tree = TreeFile.read(file).content if os.path.isfile(file) else {}
    name = os.path.basename(os.path.normpath(out))
    with replacing(out) as folder:
        layout.write(export, folder)
        files = [file for file in os.scandir(folder) if not file.name.endswith(".json")]
        n_bytes = sum(file.stat().st_size for file in files)
        card = model_card(export, layout, name, tree, n_bytes)
        write_text(os.path.join(folder, "README.md"), card)
    return layout
