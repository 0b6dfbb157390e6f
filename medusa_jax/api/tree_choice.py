"""The default tree of a model that is being loaded: chosen before its heads are read, since it decides
how many of them are needed, and measured on the device once the model is loaded."""

from dataclasses import dataclass
from pathlib import Path

import jax

from medusa_jax.api import device_tree
from medusa_jax.api.model import Model
from medusa_jax.interop.stored_heads import StoredHeads
from medusa_jax.tree import Ladder, Tree, file_ladder, load_tree_file, parse_tree
from medusa_jax.whole_files import Json


@dataclass(frozen=True)
class TreeChoice:
    """What is known so far about a model's tree.

    Attributes:
      tree: the tree, or its name as for `--tree`.
      calibrated: content of the tree file next to the heads.
      ladder: trees by number of rows, if "auto" knows them.
      unmeasured: the tree is still to be measured on this device.
    """

    tree: str | Tree
    calibrated: Json | None = None
    ladder: Ladder | None = None
    unmeasured: bool = False

    @property
    def levels(self) -> int | None:
        """Most heads that are used; None: any may be, since nothing is measured yet."""
        if self.unmeasured or isinstance(self.tree, str):
            return None
        return max(self.tree.drafted.depth, self.ladder.depth if self.ladder else 0, 1)

    def settle(self, model: Model, batch: int) -> None:
        """Measure the tree if it is unmeasured; sets the model's tree and ladder."""
        if self.calibrated and self.unmeasured:
            ladder = device_tree.measured_ladder(model, self.calibrated, [batch])
            model.tree = ladder.at(batch)
        model.ladder = self.ladder and self.ladder.having(batch, model.tree)


def for_heads(
    spec: str | Tree, stored: StoredHeads, batch: int, *marks: object
) -> TreeChoice:
    """The tree that `spec` names for these heads; "auto" is the fastest known on this device.

    Args:
      batch: rows that will be decoded at a time.
      marks: arguments of `device_tree.kept_choices` after the tree file.

    Raises:
      UserError: no tree, or one that is deeper than there are heads.
    """
    file, platform = Path(stored.directory) / "tree.json", jax.default_backend()
    calibrated = load_tree_file(file) if file.exists() else None
    ladder, unmeasured = None, False
    if calibrated and spec in ("auto", "bundled"):
        ladder = file_ladder(calibrated, platform)
    if spec == "auto" and device_tree.is_measured(calibrated):
        kept = device_tree.kept_choices(calibrated, *marks)  # type: ignore[arg-type]
        trees = device_tree.kept_trees(kept, calibrated)
        if trees:
            ladder = Ladder(dict(ladder.rungs if ladder else {}) | trees)
        spec, unmeasured = trees.get(batch, spec), batch not in trees
    elif ladder:
        spec = ladder.at(batch)
    elif spec == "auto" and not calibrated:
        spec = Tree.chain(stored.heads.n_heads)
    tree = spec if isinstance(spec, Tree) else parse_tree(spec, calibrated, platform)
    tree.check_depth(stored.heads.n_heads)
    return TreeChoice(tree, calibrated, ladder, unmeasured)
