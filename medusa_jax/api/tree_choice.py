"""The default tree of a model that is being loaded: chosen before its heads are read, since it says
how many of them are needed, and settled on the device once the model stands."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from medusa_jax.api import device_tree
from medusa_jax.api.model import Model
from medusa_jax.interop.stored_heads import StoredHeads
from medusa_jax.measured import DeviceCache
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
      calibrated: the tree file beside the heads.
      ladder: trees by number of rows, where "auto" knows them.
      unmeasured: where the choice of this device is kept, if it is still to be measured.
    """

    tree: str | Tree
    calibrated: dict[str, Any] | None = None
    ladder: Ladder | None = None
    unmeasured: DeviceCache | None = None

    @property
    def levels(self) -> int | None:
        """Heads that are used at most; None: any may be, since nothing is measured yet."""
        if self.unmeasured or isinstance(self.tree, str):
            return None
        return max(self.tree.drafted.depth, self.ladder.depth if self.ladder else 0, 1)

    def settle(self, model: Model, batch: int) -> None:
        """Measure on the model what is to be measured; it gets its tree and its ladder."""
        if self.calibrated and self.unmeasured:
            size = device_tree.choose_on_device(
                model, self.calibrated, batch, self.unmeasured
            )
            model.tree = tree_of_size(self.calibrated["growth"], size)
        model.ladder = self.ladder and self.ladder.having(batch, model.tree)


def without_heads(spec: str | Tree) -> TreeChoice:
    """Plain decoding, unless something else is asked for."""
    return TreeChoice(Tree.none() if spec == "auto" else spec)


def for_baseline(spec: str | Tree, default: Tree) -> TreeChoice:
    """The tree of a drafter that has no tree file."""
    return TreeChoice(_chosen(spec, None, default))


def for_heads(spec: str | Tree, stored: StoredHeads, batch: int, *marks: Any) -> TreeChoice:
    """What `spec` means for these heads; "auto" by what this device is known to be fastest with.

    Args:
      batch: rows that will be decoded at a time.
      marks: what else the choice of a device depends on (`device_tree.kept_choice`).

    Raises:
      UserError: no tree, or one that is deeper than there are heads.
    """
    calibrated = _tree_file(stored)
    ladder: Ladder | None = None
    unmeasured: DeviceCache | None = None
    if spec == "auto" and device_tree.is_measured(calibrated):
        ladder = device_tree.known_ladder(calibrated, *marks)
        unmeasured = device_tree.kept_choice(calibrated, batch, *marks)
        size = device_tree.kept_size(unmeasured)
        if size is not None:
            spec, unmeasured = tree_of_size(calibrated["growth"], size), None
    elif calibrated and spec in ("auto", "bundled"):
        ladder = file_ladder(calibrated, jax.default_backend())
        spec = ladder.at(batch) if ladder else spec
    tree = _chosen(spec, calibrated, Tree.chain(stored.heads.n_heads))
    tree.check_depth(stored.heads.n_heads)
    return TreeChoice(tree, calibrated, ladder, unmeasured)


def _tree_file(stored: StoredHeads) -> dict[str, Any] | None:
    """The tree file beside the heads, if there is one."""
    file = Path(stored.directory) / "tree.json"
    return load_tree_file(file) if file.exists() else None


def _chosen(spec: str | Tree, calibrated: dict[str, Any] | None, default: Tree) -> Tree:
    """The tree of a name; "auto" without a tree file is the default."""
    if isinstance(spec, Tree):
        return spec
    if spec == "auto" and calibrated is None:
        return default
    return parse_tree(spec, calibrated, jax.default_backend())
