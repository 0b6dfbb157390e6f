"""The trees of a model: the default one, one for each number of rows, and the sizes of `--tree auto` with their costs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from medusa_jax.api.form import Form
from medusa_jax.api.loaded_drafter import LoadedDrafter
from medusa_jax.arch import STORED
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.tree_size.costs import StepCosts
from medusa_jax.decoding.tree_size.gate import Gate
from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Drafter
from medusa_jax.measured import DeviceCache, device_mark
from medusa_jax.model.stored import Storage
from medusa_jax.tree.files import TreeFile, parse_tree
from medusa_jax.tree.tree import Order, Tree

# "bundled": with --tree auto all steps take the tree file's choice, or the default tree.
VARIABLE = "MEDUSA_JAX_TREES"
# SMALL: largest tree for stored or int8 weights until `calibrate` has run here. SMALLER: a second size for that tree,
# since on some processors three rows take much longer than two.
SMALL, SMALLER = 3, 2


@dataclass(frozen=True)
class TreeChoice:
    """The trees of a model, chosen before the heads are read.

    Attributes:
      tree: the default tree, for the number of rows that are decoded at a time.
      file: the tree file next to the heads, if there is one.
      by_rows: default trees by number of rows, as far as known; {}: `tree` for all.
      chooses: by default, steps choose among `sizes` of the tree, where the text cannot depend on it.
      mark: 16 hex digits of all that the time of a step depends on, this machine included, but not the tree; ""
        without a drafter.
    """

    tree: Tree
    file: TreeFile | None = None
    by_rows: Mapping[int, Tree] = field(default_factory=dict)
    chooses: bool = False
    mark: str = ""
    _costs: dict[Any, StepCosts] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, spec: str | Tree, opened: LoadedDrafter, batch: int, form: Form, mesh: Mesh
    ) -> "TreeChoice":
        """The tree that `spec` names for this drafter; `batch` rows are decoded at a time.

        Raises:
          UserError: no tree, or one that is deeper than the number of heads.
        """
        if opened.drafter.name == "none":
            plain = cls(Tree.none())
            return replace(plain, tree=plain.parse(spec, has_drafter=False))
        drafter, platform = opened.drafter, jax.default_backend()
        path = Path(opened.files.stored.directory, "tree.json") if opened.files else None
        file = TreeFile.read(path) if path and path.exists() else None
        mark = device_mark(
            drafter.heads, drafter.llama, form.storage, str(form.dtype), form.kernels.mark,
            tuple(mesh.shape.values()),
        )  # fmt: skip
        known = cls(drafter.default_tree, file, mark=mark)
        chooses = spec == "auto" and steps_choose()
        rungs = file.by_rows(platform) if file else {}
        auto = rungs or {batch: file.for_platform(platform) if file else known.tree}
        if file and is_narrow(form.storage) and file.mark != mark and steps_choose():
            auto = {n: known.first(tree, SMALL) for n, tree in auto.items()}
        known = replace(known, tree=tree_at(auto, batch), chooses=chooses)
        by_rows = auto if spec == "auto" else rungs if spec == "bundled" else {}
        tree = tree_at(by_rows, batch) if by_rows else known.parse(spec)
        drafter.check_tree(tree)
        return replace(known, tree=tree, by_rows=by_rows)

    @property
    def levels(self) -> int:
        """Maximum number of heads that decoding uses."""
        return max(1, *(t.drafted.depth for t in (self.tree, *self.by_rows.values())))

    def at(self, rows: int) -> Tree:
        """The default tree for this number of rows."""
        return tree_at(self.by_rows, rows) if self.by_rows else self.tree

    def parse(self, spec: str | Tree | None, has_drafter: bool = True) -> Tree:
        """The tree that a `--tree` value names; the default one for None and "auto".

        Raises:
          UserError: no tree, or one of draft heads without a drafter.
        """
        no_heads = UserError(
            "no draft heads are loaded: give --drafter, or use --tree none"
        )
        if spec is None or isinstance(spec, Tree):
            tree = spec or self.tree
        elif spec.isdecimal() and not has_drafter:
            raise no_heads
        else:
            tree = parse_tree(spec, self.file, self.tree)
        if tree.drafted.depth and not has_drafter:
            raise no_heads
        return tree

    def order(self, tree: Tree) -> Order:
        """An order whose first nodes are this tree: the tree file's if it fits, else the order of its choices."""
        if self.file and tree == self.file.order.tree(tree.n_nodes):
            return self.file.order
        return Order(tree.choices, tree.spares)

    def first(self, tree: Tree, nodes: int) -> Tree:
        """The first nodes of a tree, at most all."""
        return self.order(tree).tree(min(nodes, tree.n_nodes))

    def sizes(self, tree: Tree) -> tuple[Tree, ...]:
        """The sizes of a tree to choose from, plain decoding first and the tree last.

        Each is a loop to compile, so there are at most three: the tree, and its first `SMALL` or, of a small tree, `SMALLER` nodes.
        """
        nodes = SMALL if tree.n_nodes > SMALL else SMALLER
        return tuple(dict.fromkeys((Tree.none(), self.first(tree, nodes), tree)))

    def tokens(self, sizes: Sequence[Tree]) -> list[float] | None:
        """Tokens per step with each size, by the tree file's evidence; None if it lacks one."""
        return _of_sizes(self.file.tokens_by_nodes if self.file else {}, sizes)

    def step_ratios(
        self, sizes: Sequence[Tree], rows: int, acceptance: str
    ) -> list[float] | None:
        """Times of a step with each size over a plain step's; None if the tree file has others' or lacks one."""
        file = self.file
        if not file or (file.mark, file.acceptance) != (self.mark, acceptance):
            return None
        rung = file.batches.get(rows)
        return _of_sizes(rung.ratio_by_nodes if rung else {}, sizes)

    def gated(self, drafter: Drafter, engine: Engine) -> Engine:
        """The engine with a choice among the sizes of its tree; `engine` if there is only one."""
        sizes = self.sizes(engine.tree)
        return replace(engine, drafter=drafter, gated=sizes) if len(sizes) > 1 else engine

    def gate(self, engine: Engine, rows: int) -> Gate:
        """The gate at the start of a text."""
        costs, nodes_N = self.costs(engine), [tree.n_nodes for tree in engine.gated]
        ratios = costs.ratios(rows, nodes_N).tolist()
        if not costs.chunks(rows, nodes_N[-1]):
            ratios = self.step_ratios(engine.gated, rows, engine.acceptance) or ratios
        return Gate.before_text(engine.gated, ratios, self.tokens(engine.gated))

    def costs(self, engine: Engine) -> StepCosts:
        """The costs of the sizes with this rule (sampling draws noise for every level), measured while texts are decoded."""
        key = engine.acceptance, engine.gated
        if key not in self._costs:
            nodes_N = [tree.n_nodes for tree in engine.gated]
            note = DeviceCache("step_costs", self.mark, engine.acceptance, nodes_N)
            self._costs[key] = StepCosts(note)
        return self._costs[key]


def _of_sizes(by_nodes: Mapping[int, float], sizes: Sequence[Tree]) -> list[float] | None:
    """The figure of each size, 1 for plain decoding; None if one is missing."""
    figures = {**by_nodes, 1: 1.0}
    nodes_N = [tree.n_nodes for tree in sizes]
    return [figures[n] for n in nodes_N] if figures.keys() >= {*nodes_N} else None


def tree_at(by_rows: Mapping[int, Tree], rows: int) -> Tree:
    """The tree for the next listed number of rows from `rows` on, or for the largest."""
    return by_rows[min((n for n in by_rows if n >= rows), default=max(by_rows))]


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


def text_is_free(engine: Engine, dtype: np.dtype) -> bool:
    """Whether the text cannot depend on the trees of its steps.

    It depends on them if the rule reads the drafts, and in 16-bit arithmetic, where passes over different numbers
    of tokens round differently.
    """
    return not engine.rule.by_drafts and dtype.itemsize >= 4


def is_narrow(storage: Storage) -> bool:
    """Whether weights are stored narrower than computed: each row then lengthens a product."""
    return storage.weights in (STORED, "int8")


def drafted_by(drafter: Drafter, tree: Tree) -> str:
    """Who fills a tree: "hydra", "hydra+copy", "copy" or "none"."""
    who = [drafter.heads.drafter] if tree.drafted.depth else []
    return "+".join([*who, "copy"] if tree.copied_C.size else who) or "none"
