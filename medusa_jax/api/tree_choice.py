"""The default tree of a model that is being loaded."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from medusa_jax.interop.stored_heads import StoredHeads
from medusa_jax.tree.files import file_ladder, load_tree_file, parse_tree, tree_at
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json


@dataclass(frozen=True)
class TreeChoice:
    """The tree of a model as far as it is known before the heads are read.

    Attributes:
      tree: the tree, or its name as for `--tree`.
      calibrated: content of the tree file next to the heads.
      ladder: the trees by number of rows that "auto" and "bundled" know.
      unmeasured: the tree is still to be measured on this device.
    """

    tree: str | Tree
    calibrated: Json | None = None
    ladder: Mapping[int, Tree] = field(default_factory=dict)
    unmeasured: bool = False

    @classmethod
    def of(
        cls, spec: str | Tree, stored: StoredHeads, batch: int, *marks: object
    ) -> "TreeChoice":
        """The tree that `spec` names for these heads; "auto" is the fastest known on this device.

        Args:
          batch: rows that will be decoded at a time.
          marks: arguments of `device_tree.kept_choices` after the tree file.

        Raises:
          UserError: no tree, or one that is deeper than the number of heads.
        """
        file, platform = Path(stored.directory) / "tree.json", jax.default_backend()
        calibrated = load_tree_file(file) if file.exists() else None
        ladder: dict[int, Tree] = {}
        unmeasured = False
        if calibrated and spec in ("auto", "bundled"):
            ladder = file_ladder(calibrated, platform)
        if calibrated and spec == "auto" and _measuring().is_measured(calibrated):
            kept = _measuring().kept_trees(calibrated, *marks)
            ladder, unmeasured = ladder | kept, batch not in kept
        if ladder:
            spec = tree_at(ladder, batch)
        elif spec == "auto" and not calibrated:
            spec = Tree.chain(stored.heads.n_heads)
        tree = spec if isinstance(spec, Tree) else parse_tree(spec, calibrated, platform)
        tree.check_depth(stored.heads.n_heads)
        return cls(tree, calibrated, ladder, unmeasured)

    @property
    def levels(self) -> int | None:
        """Maximum number of heads that decoding uses; None if the tree is still to be measured."""
        if self.unmeasured or isinstance(self.tree, str):
            return None
        return max(1, *(t.drafted.depth for t in (self.tree, *self.ladder.values())))

    def settle(self, model: Any, batch: int) -> None:
        """Give a loaded model its default trees; measures the tree if it is unmeasured."""
        tree = model.tree
        if self.unmeasured:
            tree = _measuring().trees_by_rows(model, [batch])[batch]
        model.use_trees(tree, {**self.ladder, batch: tree} if self.ladder else {})


def _measuring() -> Any:
    """The seam of `--tree auto`: measurements on this device."""
    return importlib.import_module("medusa_jax.api.device_tree")
