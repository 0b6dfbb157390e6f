"""The draft tree as compile-time constants (Medusa 2.1.2 and 2.3.3).

A tree is a set of *choices*: each is a path of ranks, `[0, 2]` meaning "the best guess of head
1, then the third-best guess of head 2". The root, the token that the backbone has already chosen, is
added. The empty tree contains only the root and is plain autoregressive decoding.

In addition to the heads' guesses a tree may have one chain of tokens copied from the text
(`decoding/copies.py`), with the nodes `[-1]`, `[-1, -1]`, .... Where the text does not repeat, a step
replaces the chain by the tree's *spares*: the same number of further guesses of the heads.
"""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import jax
import numpy as np

from medusa_jax.errors import UserError

Choice = tuple[int, ...]
# Stands for a rank: the token is copied from the text.
COPIED = -1
# Accepted depths are stored as int8. Larger trees never help, and each program embeds an M x M mask.
MOST_DEEP, MOST_NODES = 127, 4096


@jax.tree_util.register_static
@dataclass(frozen=True)
class Tree:
    """A static tree; hashed on its choices, so it can be an argument of compiled programs.

    Build it with `from_choices`, `cartesian`, `chain`, `copies` or `none`. Nodes are ordered by depth,
    then by path; node 0 is the root. All arrays are numpy constants.

    Example: `from_choices([[0], [1], [0, 0], [0, 2]])` has five nodes,
      node        0     1    2    3      4
      path        root  [0]  [1]  [0,0]  [0,2]
      parent_M    0     0    0    1      1
      depth_M     0     1    1    2      2
      rank_M      0     0    1    0      2
    """

    choices: tuple[Choice, ...]
    spares: tuple[Choice, ...] = ()

    def __repr__(self) -> str:
        copied = f", {len(self.copied_C)} copied" if len(self.copied_C) else ""
        return f"<Tree: {self.n_nodes} nodes, {self.depth} deep{copied}>"

    @classmethod
    def from_choices(
        cls, choices: Iterable[Sequence[int]], spares: Iterable[Sequence[int]] = ()
    ) -> "Tree":
        """Validate and order a list of paths.

        Args:
          spares: further guesses of heads, best first, to replace copied nodes. Those among the choices
            are skipped; if fewer remain than there are copied nodes, the tree has no spares.

        Raises:
          UserError: a path is empty, negative (and not a copied one), given twice, or its prefix is
            missing, or listed after it among the spares; more than `MOST_NODES` nodes or deeper than
            `MOST_DEEP`.
        """
        tree = cls(_checked([_path(path) for path in choices]))
        nodes, n_copied = set(tree.choices), len(tree.copied_C)
        spare_paths = [path for path in map(_path, spares) if path not in nodes]
        if any(path[0] == COPIED for path in spare_paths):
            raise UserError("spares stand for copied nodes and cannot be copied themselves")
        _checked([*tree.drafted.choices, *spare_paths])
        # A step may use only the first of them.
        early = [path for i, path in enumerate(spare_paths) if path[:-1] in spare_paths[i:]]
        if early:
            raise UserError(f"spare {list(early[0])} is listed before its prefix")
        if len(spare_paths) < n_copied:
            return tree
        return cls(tree.choices, tuple(spare_paths[:n_copied]))

    @classmethod
    def none(cls) -> "Tree":
        """Only the root: plain autoregressive decoding."""
        return cls(())

    @classmethod
    def chain(cls, depth: int) -> "Tree":
        """A chain: one candidate per head (blockwise parallel decoding)."""
        return cls(_chain(0, depth))

    @classmethod
    def copies(cls, depth: int) -> "Tree":
        """A chain of `depth` tokens copied from the text, without heads' guesses."""
        return cls(_chain(COPIED, depth))

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> "Tree":
        """Every combination of the top s_k guesses of head k (Medusa 2.1.2).

        Widths s_1, ..., s_K give sum_k prod_{i<=k} s_i nodes, not counting the root.
        """
        if not all(isinstance(w, int | np.integer) and w > 0 for w in widths):
            raise UserError(f"cartesian widths are whole numbers, at least 1, not {widths}")
        n_nodes = 1 + sum(itertools.accumulate(widths, operator.mul))
        _check_size(n_nodes, len(widths))
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
        """Depth of the deepest node, spares included. The number of heads used is `drafted.depth`."""
        return max((len(c) for c in (*self.choices, *self.spares)), default=0)

    @cached_property
    def copied_C(self) -> np.ndarray:
        """Nodes copied from the text, by depth."""
        nodes = [i for i, c in enumerate(self.choices, 1) if c[0] == COPIED]
        return np.array(nodes, np.int32)

    @property
    def copied_M(self) -> np.ndarray:
        """Whether each node is copied from the text."""
        return self.rank_M == COPIED

    @cached_property
    def drafted(self) -> "Tree":
        """The tree with the spares in place of the copied nodes, which a drafter fills.

        Example: [[0], [-1], [-1, -1]] with the spares [1], [0, 0] gives [[0], [1], [0, 0]].
        """
        if not self.copied_C.size:
            return self
        guesses = (c for c in self.choices if c[0] != COPIED)
        return Tree(tuple(sorted((*guesses, *self.spares), key=lambda p: (len(p), p))))

    @lru_cache(maxsize=64)  # noqa: B019 - trees are few and small; a server asks before every chunk
    def with_copies(self, depth: int) -> "Tree":
        """The heads' nodes, and a chain of `depth` copied tokens."""
        guesses = [c for c in self.choices if c[0] != COPIED]
        return Tree.from_choices([*guesses, *_chain(COPIED, depth)])

    @cached_property
    def fixed(self) -> "Tree":
        """A tree of the same size without a choice between chain and spares: half of the chain, and the best spares.

        Example: [[-1], [-1, -1], [-1, -1, -1]] with the spares [0], [1], [0, 0] gives [[0], [-1], [-1, -1]].
        """
        if not self.spares:
            return self
        half = len(self.copied_C) // 2
        n_copied = len(self.copied_C) - half
        choices = [c for c in self.choices if c[0] != COPIED or len(c) <= n_copied]
        return Tree(_checked([*choices, *self.spares[:half]]))

    @property
    def path_length(self) -> int:
        """L: nodes on the longest path, the root included."""
        return self.depth + 1

    @property
    def max_rank(self) -> int:
        """The largest rank used: heads must give `max_rank + 1` candidates."""
        return max((max(c) for c in (*self.choices, *self.spares)), default=0)

    @cached_property
    def node_of(self) -> dict[Choice, int]:
        """The node of each path."""
        return {path: node for node, path in enumerate(((), *self.choices))}

    @cached_property
    def parent_M(self) -> np.ndarray:
        """Index of each node's parent; the root is its own."""
        return np.array([0] + [self.node_of[c[:-1]] for c in self.choices], np.int32)

    @cached_property
    def depth_M(self) -> np.ndarray:
        """Depth of each node, 0 for the root: position = length + depth."""
        return np.array([0] + [len(c) for c in self.choices], np.int32)

    @cached_property
    def rank_M(self) -> np.ndarray:
        """Rank of each node among the guesses of its head (0 for the root, -1 for a copied one)."""
        return np.array([0] + [c[-1] for c in self.choices], np.int32)

    @cached_property
    def mask_MM(self) -> np.ndarray:
        """Attention mask: True where the row's node sees the column's node (its ancestors and itself)."""
        mask = np.eye(self.n_nodes, dtype=bool)
        for node in range(1, self.n_nodes):  # parents come first
            mask[node] |= mask[self.parent_M[node]]
        return mask

    @cached_property
    def ancestors_ML(self) -> np.ndarray:
        """Nodes on the path from the root to each node, padded with the node itself.

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
    def children(self) -> list[list[int]]:
        """Children of each node in order of rank."""
        nodes = range(self.n_nodes)
        return [(np.flatnonzero(self.parent_M[1:] == v) + 1).tolist() for v in nodes]

    @cached_property
    def children_MC(self) -> np.ndarray:
        """`children`, padded with 0, the root.

        For the example of the class: row 0 is [1, 2], row 1 is [3, 4], the others are [0, 0].
        """
        rows = np.zeros((self.n_nodes, max(1, *map(len, self.children))), np.int32)
        for node, children in enumerate(self.children):
            rows[node, : len(children)] = children
        return rows

    def width(self, depth: int) -> int:
        """The most children that a node at this depth has."""
        return max(len(self.children[v]) for v in self.level(depth))

    @property
    def dense(self) -> "Tree":
        """The same shape with siblings renumbered to ranks 0, 1, 2, ... and without copied nodes.

        Nodes keep their order. Example: [[0], [3], [3, 2]] becomes [[0], [1], [1, 0]].
        """
        if self.copied_C.size:
            return self.drafted.dense
        new_paths: dict[Choice, Choice] = {(): ()}
        for node, choice in enumerate(self.choices, 1):
            rank = self.children[self.parent_M[node]].index(node)
            new_paths[choice] = (*new_paths[choice[:-1]], rank)
        return Tree(tuple(new_paths[c] for c in self.choices))

    def level(self, depth: int) -> np.ndarray:
        """Nodes at one depth, in order."""
        return np.flatnonzero(self.depth_M == depth)

    def parents(self, depth: int) -> np.ndarray:
        """Nodes at one depth that have children, in order."""
        return np.unique(self.parent_M[self.level(depth + 1)])

    def check_depth(self, n_heads: int) -> None:
        """Raise UserError if drafts are deeper than `Drafter.n_heads`."""
        deepest = max(self.drafted.choices, key=len, default=())
        if len(deepest) > n_heads:
            raise UserError(
                f"tree choice {list(deepest)} is {len(deepest)} deep, but trees of this drafter are "
                f"at most {n_heads} deep"
            )


def _path(path: object) -> Choice:
    """Check one choice; raises like `Tree.from_choices`."""
    if not isinstance(path, list | tuple) or not all(
        isinstance(r, int | np.integer) and not isinstance(r, bool) for r in path
    ):
        raise UserError(f"a tree choice is a list of whole numbers, not {path!r}")
    if not path:
        raise UserError(
            "a tree choice is empty: remove it, the root is added automatically"
        )
    if min(path) < 0 and set(path) != {COPIED}:
        raise UserError(
            f"tree choice {list(path)} holds a negative rank; only copied paths, all {COPIED}, may"
        )
    return tuple(int(r) for r in path)


def _chain(rank: int, depth: int) -> tuple[Choice, ...]:
    """The paths of a chain of this depth, all of one rank."""
    if not isinstance(depth, int) or depth < 0:
        raise UserError(f"the depth of a chain is a whole number, 0 or more, not {depth!r}")
    _check_size(depth + 1, depth)
    return tuple((rank,) * d for d in range(1, depth + 1))


def _checked(paths: Sequence[Choice]) -> tuple[Choice, ...]:
    """The paths of a tree, by depth; raises like `Tree.from_choices`."""
    _check_size(len(paths) + 1, max(map(len, paths), default=0))
    nodes = set(paths)
    if len(nodes) < len(paths):
        repeat = next(list(p) for p in paths if paths.count(p) > 1)
        raise UserError(f"tree choice {repeat} is given twice")
    for path in paths:
        if len(path) > 1 and path[:-1] not in nodes:
            raise UserError(
                f"tree choice {list(path)} needs its prefix {list(path[:-1])}: add it"
            )
    return tuple(sorted(nodes, key=lambda p: (len(p), p)))


def _check_size(n_nodes: int, depth: int) -> None:
    """Refuse a tree of an impossible size, before its paths are built."""
    if n_nodes > MOST_NODES or depth > MOST_DEEP:
        raise UserError(
            f"a tree has at most {MOST_NODES} nodes and is at most {MOST_DEEP} deep; this one has "
            f"{n_nodes} and is {depth} deep"
        )


def chain_as_deep(trees: Iterable[Tree]) -> Tree:
    """Return a chain as deep as the deepest of `trees`, copied if any of them has copied nodes.

    A program compiled for it fits all of them if it depends only on the length of a step and on
    whether the state contains the text.
    """
    trees = list(trees)
    copies = any(tree.copied_C.size for tree in trees)
    return (Tree.copies if copies else Tree.chain)(max(tree.depth for tree in trees))


class Order(NamedTuple):
    """The order in which nodes are added to a tree.

    Attributes:
      growth: choices, best first.
      spares: for copied nodes, see `Tree`; best first.
    """

    growth: Sequence[Sequence[int]]
    spares: Sequence[Sequence[int]] = ()

    def tree(self, n_nodes: int) -> Tree:
        """The first `n_nodes - 1` choices, plus the root."""
        return Tree.from_choices(self.growth[: n_nodes - 1], self.spares)
