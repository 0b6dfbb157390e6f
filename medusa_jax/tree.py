"""The draft tree as compile-time constants (Medusa 2.1.2 and 2.3.3).

A tree is a set of *choices*: each is a path of ranks, `[0, 2]` meaning "the best guess of head
1, then the third-best guess of head 2". The root, which is the token already chosen by the
backbone, is added. The empty tree has the root alone and is autoregressive decoding.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from medusa_jax.errors import UserError

Choice = tuple[int, ...]

# The size that a calibrated order is cut to on an accelerator that it was not fitted to.
ACCELERATOR_NODES = 64


@dataclass(frozen=True)
class Tree:
    """A static tree; hashed on its choices, so it can be a static argument of `jax.jit`.

    Build it with `from_choices`, `cartesian`, `chain` or `none`. Nodes are ordered by depth,
    then by path; node 0 is the root. All arrays are numpy constants.

    Example: `from_choices([[0], [1], [0, 0], [0, 2]])` has five nodes,
      node        0     1    2    3      4
      path        root  [0]  [1]  [0,0]  [0,2]
      parent_M    0     0    0    1      1
      depth_M     0     1    1    2      2
      rank_M      0     0    1    0      2
    """

    choices: tuple[Choice, ...]

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> "Tree":
        """Validate and order a list of paths.

        Raises:
          UserError: a path is empty, negative, given twice, or its prefix is missing.
        """
        paths: list[Choice] = []
        for path in choices:
            if not isinstance(path, list | tuple) or not all(
                isinstance(r, int | np.integer) and not isinstance(r, bool) for r in path
            ):
                raise UserError(f"a tree choice is a list of whole numbers, not {path!r}")
            if not path:
                raise UserError(
                    "a tree choice is empty: the root is added by itself, remove it"
                )
            if min(path) < 0:
                raise UserError(f"tree choice {list(path)} holds a negative rank")
            paths.append(tuple(int(r) for r in path))
        known = set(paths)
        if len(known) < len(paths):
            twice = next(list(p) for p in paths if paths.count(p) > 1)
            raise UserError(f"tree choice {twice} is given twice")
        for path in paths:
            if len(path) > 1 and path[:-1] not in known:
                raise UserError(
                    f"tree choice {list(path)} needs its prefix {list(path[:-1])}: add it"
                )
        return cls(tuple(sorted(known, key=lambda p: (len(p), p))))

    @classmethod
    def none(cls) -> "Tree":
        """The root alone: plain autoregressive decoding."""
        return cls(())

    @classmethod
    def chain(cls, depth: int) -> "Tree":
        """One candidate per head (blockwise parallel decoding)."""
        if depth < 0:
            raise UserError(f"a chain is 0 or more nodes deep, not {depth}")
        return cls.cartesian([1] * depth)

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> "Tree":
        """Every combination of the top s_k guesses of head k (Medusa 2.1.2).

        Widths s_1, ..., s_K give sum_k prod_{i<=k} s_i nodes behind the root.
        """
        if any(w < 1 for w in widths):
            raise UserError(f"cartesian widths must be at least 1, not {list(widths)}")
        paths: list[Sequence[int]] = []
        for depth in range(1, len(widths) + 1):
            paths += itertools.product(*(range(w) for w in widths[:depth]))
        return cls.from_choices(paths)

    @property
    def n_nodes(self) -> int:
        """M: nodes, the root included."""
        return len(self.choices) + 1

    @property
    def depth(self) -> int:
        """Depth of the deepest node: how many heads the tree uses."""
        return max((len(c) for c in self.choices), default=0)

    @property
    def path_length(self) -> int:
        """L: nodes on the longest path, the root included."""
        return self.depth + 1

    @property
    def max_rank(self) -> int:
        """The largest rank used: heads must give `max_rank + 1` candidates."""
        return max((max(c) for c in self.choices), default=0)

    @cached_property
    def parent_M(self) -> np.ndarray:
        """Index of each node's parent; the root is its own."""
        index = {c: i + 1 for i, c in enumerate(self.choices)} | {(): 0}
        return np.array([0] + [index[c[:-1]] for c in self.choices], np.int32)

    @cached_property
    def depth_M(self) -> np.ndarray:
        """Depth of each node, 0 for the root: position = length + depth."""
        return np.array([0] + [len(c) for c in self.choices], np.int32)

    @cached_property
    def rank_M(self) -> np.ndarray:
        """Rank of each node among the guesses of its head (0 for the root)."""
        return np.array([0] + [c[-1] for c in self.choices], np.int32)

    @cached_property
    def mask_MM(self) -> np.ndarray:
        """True where the row's node sees the column's node: its ancestors and itself."""
        mask = np.eye(self.n_nodes, dtype=bool)
        for node in range(1, self.n_nodes):  # parents come first
            mask[node] |= mask[self.parent_M[node]]
        return mask

    @cached_property
    def ancestors_ML(self) -> np.ndarray:
        """Nodes on the way from the root to each node; the node itself fills the rest.

        For the example of the class: row 4 is [0, 1, 4], row 2 is [0, 2, 2].
        """
        rows = np.tile(
            np.arange(self.n_nodes, dtype=np.int32)[:, None], (1, self.path_length)
        )
        for node in range(self.n_nodes):
            walk = node
            for depth in range(self.depth_M[node], -1, -1):
                rows[node, depth] = walk
                walk = self.parent_M[walk]
        return rows

    @cached_property
    def children_MC(self) -> np.ndarray:
        """Children of each node in order of rank; 0, the root, fills the rest.

        For the example of the class: row 0 is [1, 2], row 1 is [3, 4], the others are [0, 0].
        """
        lists = [np.flatnonzero(self.parent_M[1:] == v) + 1 for v in range(self.n_nodes)]
        rows = np.zeros((self.n_nodes, max(1, max(map(len, lists)))), np.int32)
        for node, children in enumerate(lists):
            rows[node, : len(children)] = children
        return rows

    def width(self, depth: int) -> int:
        """The most children that a node at this depth has."""
        return int((self.children_MC[self.level(depth)] > 0).sum(-1).max())

    @property
    def dense(self) -> "Tree":
        """The same shape with the ranks of every family made 0, 1, 2, ...

        Nodes keep their order. Example: [[0], [3], [3, 2]] becomes [[0], [1], [1, 0]].
        """
        renamed: dict[Choice, Choice] = {(): ()}
        for node, choice in enumerate(self.choices, 1):
            family = self.children_MC[self.parent_M[node]].tolist()
            renamed[choice] = (*renamed[choice[:-1]], family.index(node))
        return Tree(tuple(renamed[c] for c in self.choices))

    @property
    def is_dense(self) -> bool:
        """Whether the j-th child of every node has rank j."""
        return self.dense == self

    def level(self, depth: int) -> np.ndarray:
        """Nodes at one depth, in order."""
        return np.flatnonzero(self.depth_M == depth)

    def check_depth(self, n_heads: int) -> None:
        """Raise UserError when the tree is deeper than there are heads."""
        deep = next((list(c) for c in self.choices if len(c) > n_heads), None)
        if deep is not None:
            raise UserError(
                f"tree choice {deep} is {len(deep)} deep, but there are only {n_heads} heads"
            )


def load_tree_file(path: str | Path) -> dict:
    """A tree file: a JSON list of choices, or an object with `choices` (and evidence).

    Raises:
      UserError: not readable, not JSON, or neither of the two forms.
    """
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot read the tree file {path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"tree file {path} is not valid JSON: {error}") from error
    if isinstance(data, list):
        data = {"choices": data}
    if not isinstance(data, dict) or not isinstance(data.get("choices"), list):
        raise UserError(f"tree file {path} must be a list of choices or hold 'choices'")
    return data


def tree_of_size(growth: Sequence[Sequence[int]], n_nodes: int) -> Tree:
    """The first `n_nodes - 1` choices of a growth order (best first), plus the root."""
    if not 1 <= n_nodes <= len(growth) + 1:
        raise UserError(
            f"a tree of {n_nodes} nodes was asked for; the calibrated order has 1 to "
            f"{len(growth) + 1} (run `python -m medusa_jax.calibrate` for more)"
        )
    return Tree.from_choices(growth[: n_nodes - 1])


def auto_tree(calibrated: dict, platform: str) -> Tree:
    """The calibrated tree as it is on the platform it was fitted to, cut anew elsewhere.

    A CPU takes the file's own size whatever it was fitted to; an accelerator's step is bound
    by reading weights, where 64 nodes cost little more than one (Medusa 2.3.3).

    Args:
      platform: "cpu", "gpu" or "tpu", as `jax.default_backend()` names it.
    """
    if platform in ("cpu", calibrated.get("platform")):
        return Tree.from_choices(calibrated["choices"])
    growth = calibrated.get("growth", calibrated["choices"])
    return tree_of_size(growth, min(ACCELERATOR_NODES, len(growth) + 1))


def parse_tree(spec: str, calibrated: dict | None = None, platform: str = "cpu") -> Tree:
    """The tree that a `--tree` value names.

    Args:
      spec: "none", "auto", a number of nodes (root included), "cartesian:2,3", "chain:4" or
        the path of a JSON file.
      calibrated: content of the tree file that lies beside the heads, for "auto" (its
        `choices`) and a number (the first nodes of its `growth`).
      platform: where the tree is to run, see `auto_tree`.
    """
    kind, _, rest = spec.partition(":")
    try:
        if spec == "none":
            return Tree.none()
        if kind == "chain":
            return Tree.chain(int(rest))
        if kind == "cartesian":
            return Tree.cartesian([int(w) for w in rest.split(",")])
    except ValueError as error:
        raise UserError(
            f"--tree {spec!r}: write chain:4 or cartesian:2,3 with whole numbers"
        ) from error
    if spec == "auto" or spec.isdecimal():
        if calibrated is None:
            raise UserError(
                f"--tree {spec} needs a calibrated tree beside the heads: run "
                "`python -m medusa_jax.calibrate`, or give cartesian:.., chain:.. or a file"
            )
        if spec == "auto":
            return auto_tree(calibrated, platform)
        return tree_of_size(calibrated.get("growth", calibrated["choices"]), int(spec))
    try:
        return Tree.from_choices(load_tree_file(spec)["choices"])
    except UserError as error:
        raise UserError(f"{spec}: {error}") from error
