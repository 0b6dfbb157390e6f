"""The default tree of a model that is being loaded: chosen before its heads are read, since it decides
how many of them are needed, and measured on the device once the model is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from medusa_jax.api import device_tree
from medusa_jax.api.model import Model
from medusa_jax.interop.stored_heads import StoredHeads
from medusa_jax.tree import (
    Ladder,
    Tree,
    file_ladder,
    load_tree_file,
    parse_tree,
    tree_of_size,
)


@dataclass(frozen=True)
class TreeChoice:
    """What is known of a model's tree so far.

    Attributes:
      tree: the tree, or its name as for `--tree`.
      calibrated: content of the tree file next to the heads.
      ladder: trees by number of rows, where "auto" knows them.
      unmeasured: the tree is still to be measured on this device.
    """

    tree: str | Tree
    calibrated: dict[str, Any] | None = None
    ladder: Ladder | None = None
    unmeasured: bool = False

    @property
    def levels(self) -> int | None:
        """Most heads that are used; None: any may be, since nothing is measured yet."""
        if self.unmeasured or isinstance(self.tree, str):
            return None
        return max(self.tree.drafted.depth, self.ladder.depth if self.ladder else 0, 1)

    def settle(self, model: Model, batch: int) -> None:
        """Measure on the model what is to be measured; it gets its tree and its ladder."""
        if self.calibrated and self.unmeasured:
            measured = device_tree.measured_ladder(model, self.calibrated, [batch])
            model.tree = measured.at(batch)
        model.ladder = self.ladder and self.ladder.having(batch, model.tree)


def without_tree_file(spec: str | Tree, default: Tree) -> TreeChoice:
    """The tree of a drafter that has no tree file; "auto" is the default."""
    return TreeChoice(default if spec == "auto" else parsed(spec, None))


def for_heads(spec: str | Tree, stored: StoredHeads, batch: int, *marks: Any) -> TreeChoice:
    """What `spec` means for these heads; "auto" by what this device is known to be fastest with.

    Args:
      batch: rows that will be decoded at a time.
      marks: what else the choice of a device depends on (`device_tree.kept_choice`).

    Raises:
      UserError: no tree, or one that is deeper than there are heads.
    """
    file = Path(stored.directory) / "tree.json"
    calibrated = load_tree_file(file) if file.exists() else None
    ladder, unmeasured = None, False
    if spec == "auto" and device_tree.is_measured(calibrated):
        ladder = device_tree.known_ladder(calibrated, *marks)
        size = device_tree.kept_choice(calibrated, batch, *marks).read("nodes", int)
        unmeasured = size is None
        if size is not None:
            spec = tree_of_size(calibrated["growth"], size)
    elif calibrated and spec in ("auto", "bundled"):
        ladder = file_ladder(calibrated, jax.default_backend())
        spec = ladder.at(batch) if ladder else spec
    elif spec == "auto":
        spec = Tree.chain(stored.heads.n_heads)
    tree = parsed(spec, calibrated)
    tree.check_depth(stored.heads.n_heads)
    return TreeChoice(tree, calibrated, ladder, unmeasured)


def parsed(spec: str | Tree, calibrated: dict[str, Any] | None) -> Tree:
    """The tree of a name."""
    if isinstance(spec, Tree):
        return spec
    return parse_tree(spec, calibrated, jax.default_backend())
