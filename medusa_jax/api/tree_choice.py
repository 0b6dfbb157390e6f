"""The trees of a model: the default one, one for each number of rows, and the sizes of `--tree auto`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from medusa_jax.arch import STORED
from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Drafter
from medusa_jax.measured import device_mark
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.stored import Storage
from medusa_jax.tree.files import (
    auto_tree,
    load_tree_file,
    order_of,
    parse_tree,
    tree_at,
    trees_by_rows,
)
from medusa_jax.tree.tree import Order, Tree
from medusa_jax.whole_files import Json

# "bundled": with --tree auto, too, all steps use the tree file's choice or the default tree.
VARIABLE = "MEDUSA_JAX_TREES"
# Nodes of the small tree: narrow weights (stored, int8) use no larger one until `calibrate` has run on this machine. Its
# steps also choose the smaller one, since on some processors three rows take much longer than two.
SMALL, SMALLER = 3, 2


@dataclass(frozen=True)
class TreeChoice:
    """The tree of a model, chosen before the heads are read.

    Attributes:
      tree: the tree, or its name as for `--tree`.
      calibrated: content of the tree file next to the heads.
      by_rows: for "auto" and "bundled", the tree file's trees by number of rows.
      chooses: each step takes one of the sizes of its tree (`sizes_of`).
      levels: maximum number of heads that decoding uses.
      mark: as for `of`.
    """

    tree: str | Tree
    calibrated: Json | None = None
    by_rows: Mapping[int, Tree] = field(default_factory=dict)
    chooses: bool = False
    levels: int | None = None
    mark: str = ""

    @classmethod
    def of(
        cls,
        spec: str | Tree,
        drafter: Drafter,
        directory: str,
        batch: int,
        storage: Storage,
        mark: str,
    ) -> "TreeChoice":
        """The tree that `spec` names for a drafter.

        Args:
          directory: where a tree file may be; "" for a drafter without files.
          batch: rows that will be decoded at a time.
          storage: the form of the model's weights.
          mark: `step_mark` of this machine and model.

        Raises:
          UserError: no tree, or one that is deeper than the number of heads.
        """
        file, platform = Path(directory or "?") / "tree.json", jax.default_backend()
        calibrated = load_tree_file(file) if directory and file.exists() else None
        chooses = spec == "auto" and steps_choose()
        rungs = trees_by_rows(calibrated, platform) if calibrated else {}
        auto = rungs
        if calibrated:
            auto = rungs or {batch: auto_tree(calibrated, platform)}
            if is_narrow(storage) and calibrated.get("mark") != mark and steps_choose():
                auto = {n: small_tree(t, calibrated) for n, t in auto.items()}
        by_rows = auto if spec == "auto" else rungs if spec == "bundled" else {}
        tree = tree_at(by_rows, batch) if by_rows else spec
        if isinstance(tree, str):
            default = tree_at(auto, batch) if auto else drafter.default_tree
            tree = parse_tree(tree, calibrated, default)
        drafter.check_tree(tree)
        levels = max(1, *(t.drafted.depth for t in (tree, *by_rows.values())))
        return cls(tree, calibrated, by_rows, chooses, levels, mark)


def step_mark(
    drafter: Drafter, dtype: np.dtype, mesh: Mesh, storage: Storage, kernels: Kernels
) -> str:
    """Key of what a step's time depends on besides the tree; `calibrate` writes it to the tree file."""
    shape = tuple(mesh.shape.values())
    return device_mark(
        drafter.heads, drafter.llama, storage, str(dtype), kernels.mark, shape
    )


def steps_choose() -> bool:
    """Whether steps may choose sizes with "auto".

    Not with several processes, which would choose different sizes and run different programs.

    Raises:
      UserError: the variable has another value than "bundled".
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "bundled"):
        raise UserError(f"{VARIABLE} is bundled or not set, not {value!r}")
    return value == "" and jax.process_count() == 1


def is_narrow(storage: Storage) -> bool:
    """Whether weights are stored narrower than computed: each row then lengthens a product."""
    return storage.weights in (STORED, "int8")


def small_tree(tree: Tree, calibrated: Json | None, nodes: int = SMALL) -> Tree:
    """The first nodes of a tree."""
    return order_with(tree, calibrated).tree(min(nodes, tree.n_nodes))


def order_with(tree: Tree, calibrated: Json | None) -> Order:
    """An order whose first nodes are this tree: the tree file's if it fits, else the order of its choices."""
    order = order_of(calibrated) if calibrated is not None else Order(())
    if len(order.growth) + 1 >= tree.n_nodes and tree == order.tree(tree.n_nodes):
        return order
    return Order(tree.choices, tree.spares)


def sizes_of(tree: Tree, calibrated: Json | None) -> tuple[Tree, ...]:
    """The sizes of a tree to choose from, plain decoding first and the tree last.

    Each is a loop to compile, so there are at most three: the tree, and its first `SMALL` or, of a small tree, `SMALLER` nodes.
    """
    nodes = SMALL if tree.n_nodes > SMALL else SMALLER
    sizes = Tree.none(), small_tree(tree, calibrated, nodes), tree
    return tuple(dict.fromkeys(sizes))


def drafted_by(drafter: Drafter, tree: Tree) -> str:
    """Who fills a tree: "hydra", "hydra+copy", "copy" or "none"."""
    who = [drafter.heads.drafter] if tree.drafted.depth else []
    return "+".join([*who, "copy"] if tree.copied_C.size else who) or "none"


def tokens_of(sizes: tuple[Tree, ...], calibrated: Json | None) -> list[float] | None:
    """Tokens per step with each size, by the tree file's evidence; None if it lacks one."""
    rows = ((calibrated or {}).get("evidence") or {}).get("ladder") or []
    tokens = {row["nodes"]: row["tokens_per_step"] for row in rows} | {1: 1.0}
    if any(tree.n_nodes not in tokens for tree in sizes):
        return None
    return [tokens[tree.n_nodes] for tree in sizes]
