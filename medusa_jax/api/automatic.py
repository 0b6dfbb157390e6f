"""`--tree auto`: the trees that decoding chooses from, and what earlier processes learned of them.

A drafter without a tree file is gated (`decoding/gate.py`): each step drafts a short chain, a long one, or
nothing. With a tree file the tree stays the same, since its evidence says how many tokens each size
gives; how long a step takes is measured on the user's device by the requests themselves, plain ones (as of
`--compare`) among them. It is kept in the user's cache directory, and the next process begins with it.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np

from medusa_jax.api.results import Options
from medusa_jax.arch import STORED
from medusa_jax.decoding.acceptance import RULES
from medusa_jax.decoding.gate import Gate
from medusa_jax.decoding.generate import DecodeRequest
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.step_times import Learned, Watch
from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Drafter
from medusa_jax.measured import DeviceCache
from medusa_jax.model.stored import Storage
from medusa_jax.tree.files import (
    ACCELERATOR_NODES,
    auto_tree,
    file_ladder,
    tree_at,
    tree_of_size,
)
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json

# "bundled": always use the tree file's own choice.
VARIABLE = "MEDUSA_JAX_TREES"
# Nodes of the first tree without evidence, or where weights are narrow.
FEW = 3
# By measurements on this device, a tree may become this much larger than the tree file's choice, and must be
# faster than plain decoding by this factor.
REACH, MARGIN = 2.0, 1.03
# Time of a further node in plain steps, before any is measured.
NODE_COST = {"cpu": 0.15, "other": 0.02}


def is_automatic() -> bool:
    """Whether "auto" follows measurements.

    Not with several processes, which would choose different trees and run different programs.

    Raises:
      UserError: the variable has another value than "bundled".
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "bundled"):
        raise UserError(f"{VARIABLE} is bundled or not set, not {asked!r}")
    return asked == "" and jax.process_count() == 1


def ladder_of(calibrated: Json | None) -> list[Json]:
    """The rows of a tree file's evidence; [] if it has none."""
    most = len((calibrated or {}).get("growth", ())) + 1
    rows = ((calibrated or {}).get("evidence") or {}).get("ladder") or []
    return [row for row in rows if row["nodes"] <= most]


def tokens_by_size(calibrated: Json | None) -> dict[int, float]:
    """Tokens per step by number of nodes, smallest first, from the tree file's evidence.

    On an accelerator a step with 64 nodes costs little more than with one, so that size is added with the
    tokens per step of the largest size in the evidence.
    """
    most = len((calibrated or {}).get("growth", ())) + 1
    found = {row["nodes"]: row["tokens_per_step"] for row in ladder_of(calibrated)}
    if found and jax.default_backend() != "cpu" and max(found) < ACCELERATOR_NODES <= most:
        found[ACCELERATOR_NODES] = found[max(found)]
    return found and {1: 1.0} | dict(sorted(found.items()))


def expected_ratios(calibrated: Json | None, sizes: Iterable[int]) -> dict[int, float]:
    """Step time by size over a plain step's, by the tree file's evidence or a rule of thumb."""
    platform = jax.default_backend()
    node = NODE_COST["cpu" if platform == "cpu" else "other"]
    here = calibrated and calibrated.get("platform", platform) == platform
    ladder = ladder_of(calibrated) if here else []
    rows = {row["nodes"]: row.get("step_latency_ratio") for row in ladder}
    return {1: 1.0} | {n: rows.get(n) or 1 + node * (n - 1) for n in sizes if n > 1}


@dataclass
class Automatic:
    """The automatic trees of a model.

    Attributes:
      calibrated: content of the tree file next to the heads, or None.
      narrow: weights are stored narrower than they are computed in, so further rows of a product cost time.
      cache: keeps what is learned; None: nothing is learned, and all steps take the same tree.
    """

    drafter: Drafter
    calibrated: Json | None
    narrow: bool
    cache: DeviceCache | None = None
    _learned: dict[str, Learned] = field(default_factory=dict)
    _trees: dict[str, Tree] = field(default_factory=dict)

    @classmethod
    def of(
        cls, drafter: Drafter, calibrated: Json | None, storage: Storage, *marks: object
    ) -> "Automatic":
        """For a drafter and its tree file.

        Args:
          marks: what else determines the time of a step.
        """
        if not is_automatic():
            return cls(drafter, calibrated, narrow=False)
        narrow = storage.weights in (STORED, "int8")
        sizes = tokens_by_size(calibrated), (calibrated or {}).get("growth")
        cache = DeviceCache(
            "trees", 5, drafter.heads, drafter.llama, sizes, storage, *marks
        )
        return cls(drafter, calibrated, narrow, cache)

    @property
    def gated(self) -> tuple[Tree, ...]:
        """The trees that steps choose from: none, and chains of two and of all drafts.

        () with a tree file. A default tree that is not a chain is the only other one.
        """
        default = self.drafter.default_tree
        if self.calibrated is not None:
            return ()
        if default.n_nodes != default.depth + 1:
            return Tree.none(), default
        depths = {min(FEW - 1, default.depth), default.depth}
        return Tree.none(), *(Tree.chain(d) for d in sorted(depths))

    def learned(self, rows: int, rule: str = "greedy") -> Learned:
        """The measurements for a number of rows and an acceptance rule.

        The rule matters: sampling draws noise for every level of the tree.
        """
        name = f"{rows} {rule}"
        if name not in self._learned:
            if self.calibrated is None:
                sizes = [tree.n_nodes for tree in self.gated]
            else:
                sizes = [self._own(rows).n_nodes, *tokens_by_size(self.calibrated)]
            note = self.cache.read().get(name, {}) if self.cache else {}
            expected = expected_ratios(self.calibrated, sizes)
            self._learned[name] = Learned(expected, note)
        return self._learned[name]

    def tree(self, rows: int, rule: str = "greedy") -> Tree:
        """The tree of steps that are not gated: the fastest, as known when it was first asked for.

        A tree file's own choice stands until a step with it, and a plain one, have been timed on this device.
        """
        name = f"{rows} {rule}"
        if name not in self._trees:
            self._trees[name] = self._fastest(rows, rule)
        return self._trees[name]

    def used(self, rows: int) -> list[Tree]:
        """All trees that requests of this number of rows may take."""
        return [*self.gated, *(self.tree(rows, rule) for rule in RULES)]

    def _own(self, rows: int) -> Tree:
        """The tree file's choice."""
        assert self.calibrated is not None
        platform = jax.default_backend()
        ladder = file_ladder(self.calibrated, platform)
        return tree_at(ladder, rows) if ladder else auto_tree(self.calibrated, platform)

    def _fastest(self, rows: int, rule: str) -> Tree:
        learned = self.learned(rows, rule)
        if self.calibrated is None:
            p = learned.acceptance_rate
            speeds = {
                tree: sum(p**d for d in range(tree.depth + 1)) / learned.ratio(tree.n_nodes)
                for tree in self.gated
            }
            return max(speeds, key=lambda tree: speeds[tree])
        own, tokens = self._own(rows), tokens_by_size(self.calibrated)
        if not tokens:
            return own
        if not learned.measured:
            n = min(FEW, own.n_nodes) if self.narrow else own.n_nodes
            return own if n == own.n_nodes else tree_of_size(self.calibrated, n)
        ahead = {
            n: t / learned.ratio(n) for n, t in tokens.items() if n <= REACH * own.n_nodes
        }
        n = max(ahead, key=lambda n: ahead[n])
        fits = tree_of_size(self.calibrated, n).drafted.depth <= self.drafter.n_heads
        return (
            tree_of_size(self.calibrated, n) if fits and ahead[n] > MARGIN else Tree.none()
        )

    def prepare(
        self,
        engine: Engine,
        rows: Sequence[Options],
        dtype: np.dtype,
        request: DecodeRequest,
        auto: bool,
    ) -> Engine:
        """Time a request's steps, and let it choose among trees where its text cannot depend on them.

        It could under rules that read the drafts, with a limit of steps, and in 16-bit arithmetic, where
        passes over different numbers of tokens round differently. With a constraint the host takes part
        in every step. A tree file's tree stays, since programs with several take longer to compile.

        Args:
          auto: the caller asked for no other tree.
        """
        B, rule = len(rows), engine.acceptance
        learned = self.learned(B, rule)
        sizes: tuple[int, ...] = (engine.tree.n_nodes,)
        free = all(o.max_steps is None and o.constraint is None for o in rows)
        exact = engine.rule.lossless and not engine.rule.by_drafts and dtype.itemsize >= 4
        if (trees := self.gated) and self.cache and auto and free and exact:
            engine = replace(engine, drafter=self.drafter, tree=trees[-1], gated=trees)
            sizes = tuple(tree.n_nodes for tree in trees)
            ratios = [learned.ratio(n) for n in sizes]
            p = learned.acceptance_rate
            request.gate = Gate.before_text(trees, self.drafter, B, ratios, p)
        if auto:
            request.sizes = sizes
        if self.cache and free and all(n in learned.expected for n in sizes):
            request.watch = Watch(
                learned, sizes, partial(self.keep, learned, f"{B} {rule}")
            )
        return engine

    def keep(self, learned: Learned, name: str) -> None:
        """Keep what was learned for the next process."""
        if self.cache:
            self.cache.write(self.cache.read() | {name: learned.note()})
