"""A tree for each batch size.

Rows of a batch share the arithmetic units, so the best tree becomes smaller as the batch grows, down
to the empty one, which is plain decoding.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from medusa_jax.errors import UserError
from medusa_jax.tree.files import tree_of_size
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json


@dataclass(frozen=True)
class Ladder:
    """Trees by batch size.

    Attributes:
      rungs: number of rows -> tree; at least one.
    """

    rungs: Mapping[int, Tree]

    def at(self, rows: int) -> Tree:
        """The tree for this number of rows: the rung for the same or the next larger one, or the last."""
        above = [n for n in self.rungs if n >= rows]
        return self.rungs[min(above) if above else max(self.rungs)]

    def having(self, rows: int, tree: Tree) -> "Ladder":
        """A copy of the ladder with this rung added or replaced."""
        return Ladder(dict(self.rungs) | {rows: tree})

    @property
    def depth(self) -> int:
        """Number of heads used: the drafted depth of the deepest tree."""
        return max(tree.drafted.depth for tree in self.rungs.values())


def file_ladder(calibrated: Json, platform: str = "cpu") -> Ladder | None:
    """Return the ladder under `batches` of a tree file; None if it has none for the platform.

    A CPU uses a ladder that was fitted to any platform, as with the file's tree (`files.auto_tree`).

    Raises:
      UserError: malformed rungs.
    """
    if platform not in ("cpu", calibrated.get("platform")):
        return None
    try:
        sizes = {rung["batch"]: rung["nodes"] for rung in calibrated.get("batches") or ()}
    except (TypeError, KeyError):
        sizes = {0: 0}
    if not all(type(n) is int and n > 0 for rung in sizes.items() for n in rung):
        raise UserError(
            "the tree file's 'batches' must be a list of objects with whole numbers 'batch' and 'nodes'"
        )
    growth = calibrated.get("growth") or calibrated["choices"]
    trees = {rows: tree_of_size(growth, size) for rows, size in sizes.items()}
    return Ladder(trees) if trees else None
