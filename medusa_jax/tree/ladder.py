"""A tree for each number of rows: what pays for one row may not pay for eight.

Rows of a batch take each other's arithmetic, so trees become smaller as batches grow, down to the
empty one, which is plain decoding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa_jax.errors import UserError
from medusa_jax.tree.files import tree_of_size
from medusa_jax.tree.tree import Tree


@dataclass(frozen=True)
class Ladder:
    """Its rungs: number of rows -> tree; at least one."""

    rungs: Mapping[int, Tree]

    def at(self, rows: int) -> Tree:
        """The tree for so many rows: the rung of the next number that has one, or the last."""
        above = [n for n in self.rungs if n >= rows]
        return self.rungs[min(above) if above else max(self.rungs)]

    def having(self, rows: int, tree: Tree) -> "Ladder":
        """The ladder with this rung, whatever it had there."""
        return Ladder(dict(self.rungs) | {rows: tree})

    @property
    def depth(self) -> int:
        """Of its deepest tree's drafts: so many heads are used."""
        return max(tree.drafted.depth for tree in self.rungs.values())


def file_ladder(calibrated: Mapping[str, Any], platform: str = "cpu") -> Ladder | None:
    """The ladder that a tree file holds under `batches`; None where it holds none for the platform.

    A CPU takes one whatever it was fitted to, as it does with the file's tree (`files.auto_tree`).

    Raises:
      UserError: rungs that are none.
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
    growth = calibrated.get("growth", calibrated["choices"])
    trees = {rows: tree_of_size(growth, size) for rows, size in sizes.items()}
    return Ladder(trees) if trees else None
