"""The default tree of a model that is being loaded."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from medusa_jax.heads.drafter import Drafter
from medusa_jax.model.stored import Storage
from medusa_jax.tree.files import file_ladder, load_tree_file, parse_tree, tree_at
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.api.automatic import Automatic


@dataclass(frozen=True)
class TreeChoice:
    """The tree of a model as far as it is known before the heads are read.

    Attributes:
      tree: the tree, or its name as for `--tree`.
      calibrated: content of the tree file next to the heads.
      ladder: the trees by number of rows that "auto" and "bundled" know.
      automatic: chooses the tree while decoding; None: `tree` is used throughout.
      levels: maximum number of heads that decoding uses.
    """

    tree: str | Tree
    calibrated: Json | None = None
    ladder: Mapping[int, Tree] = field(default_factory=dict)
    automatic: "Automatic | None" = None
    levels: int | None = None

    @classmethod
    def of(
        cls,
        spec: str | Tree,
        drafter: Drafter,
        directory: str,
        batch: int,
        storage: Storage,
        *marks: object,
    ) -> "TreeChoice":
        """The tree that `spec` names for a drafter.

        Args:
          directory: where a tree file may be; "" for a drafter without files.
          batch: rows that will be decoded at a time.
          storage, marks: as for `Automatic.of`.

        Raises:
          UserError: no tree, or one that is deeper than the number of heads.
        """
        file, platform = Path(directory or "?") / "tree.json", jax.default_backend()
        calibrated = load_tree_file(file) if directory and file.exists() else None
        automatic, ladder = None, dict[int, Tree]()
        if calibrated and spec in ("auto", "bundled"):
            ladder = file_ladder(calibrated, platform)
        if spec == "auto":
            trees = importlib.import_module("medusa_jax.api.automatic")
            automatic = trees.Automatic.of(drafter, calibrated, storage, *marks)
            ladder[batch] = automatic.tree(batch)
        if ladder:
            spec = tree_at(ladder, batch)
        tree = spec if isinstance(spec, Tree) else parse_tree(spec, calibrated, platform)
        drafter.check_tree(tree)
        if automatic and not automatic.cache:
            automatic = None
        used = [tree, *ladder.values(), *(automatic.used(batch) if automatic else ())]
        levels = max(1, *(t.drafted.depth for t in used))
        return cls(tree, calibrated, ladder, automatic, levels)
