"""Trees: one with everything in it, random ones, and trees as traced arrays."""

import dataclasses
import itertools
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from medusa_jax.tree.tree import Tree

# Ranks with gaps, leaves between inner nodes, every depth reached by more than one node.
WILD = Tree.from_choices(
    [[0], [2], [4], [2, 1], [4, 0], [4, 3], [2, 1, 0], [2, 1, 3], [4, 3, 2]]
    + [[4, 3, 2, 1], [2, 1, 3, 0]]
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["parent_M", "depth_M", "rank_M", "mask_MM", "ancestors_ML"],
    meta_fields=["n_nodes", "depth", "path_length", "max_rank"],
)
@dataclasses.dataclass
class TracedTree:
    """A tree as traced arrays: one compilation serves all trees of these sizes."""

    parent_M: jax.Array
    depth_M: jax.Array
    rank_M: jax.Array
    mask_MM: jax.Array
    ancestors_ML: jax.Array
    n_nodes: int
    depth: int
    path_length: int
    max_rank: int
    copied_C: ClassVar[np.ndarray] = np.zeros(0, int)

    @property
    def drafted(self) -> "TracedTree":
        """Nothing is copied in it."""
        return self

    @property
    def copied_M(self) -> jax.Array:
        return self.rank_M < 0

    @classmethod
    def of(cls, tree: Tree, max_rank: int = 9) -> "TracedTree":
        names = ("parent_M", "depth_M", "rank_M", "mask_MM", "ancestors_ML")
        arrays = (jnp.asarray(getattr(tree, name)) for name in names)
        return cls(*arrays, tree.n_nodes, tree.depth, tree.path_length, max_rank)


@st.composite
def trees(draw, n_nodes: int | None = None, depth: int | None = None, max_rank: int = 4):
    """A random tree; with `n_nodes` and `depth` given, of exactly these sizes. Ranks have gaps."""
    if n_nodes is None:
        n_nodes = draw(st.integers(1, 14))
    if depth is None:
        depth = draw(st.integers(min(1, n_nodes - 1), min(4, n_nodes - 1)))
    paths: list[tuple[int, ...]] = [()]
    for i in range(n_nodes - 1):
        if i < depth:  # first a path to the full depth
            parent = paths[-1]
        else:
            free = [
                p
                for p in paths
                if len(p) < depth and sum(q[:-1] == p for q in paths if q) <= max_rank
            ]
            if not free:
                break
            parent = draw(st.sampled_from(free))
        taken = {q[-1] for q in paths if q and q[:-1] == parent}
        rank = draw(st.sampled_from([r for r in range(max_rank + 1) if r not in taken]))
        paths.append((*parent, rank))
    return Tree.from_choices(draw(st.permutations(paths[1:])))


def random_tree(rng, n_nodes: int, depth: int, max_rank: int = 6) -> Tree:
    """A random tree of exactly these sizes, without hypothesis; ranks have gaps."""
    paths = [(0,) * d for d in range(1, depth + 1)]
    while len(paths) < n_nodes - 1:
        above = [p for p in [(), *paths] if len(p) < depth]
        new = (*above[rng.integers(len(above))], int(rng.integers(max_rank + 1)))
        if new not in paths:
            paths.append(new)
    return Tree.from_choices(paths)


def all_trees(ranks: int, depth: int, size: int) -> list[Tree]:
    """Every prefix-closed set of `size` paths."""
    depths = range(1, depth + 1)
    paths = [p for d in depths for p in itertools.product(range(ranks), repeat=d)]
    trees = []
    for chosen in itertools.combinations(paths, size):
        if all(len(p) == 1 or p[:-1] in chosen for p in chosen):
            trees.append(Tree.from_choices(chosen))
    return trees
