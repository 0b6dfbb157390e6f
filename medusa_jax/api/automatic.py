"""`--tree auto`: the sizes that decoding chooses from, and what earlier processes learned of them.

`decoding/adapting.py` chooses among them by the steps of the running process. Which of them is fastest
depends on the device, the heads and the number of rows; it is kept in the user's cache directory, so that
the next process begins with it.
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np

from medusa_jax.api.results import Options
from medusa_jax.arch import STORED
from medusa_jax.decoding.adapting import Sizes, follows_free
from medusa_jax.decoding.chooser import KNOWN, Learned
from medusa_jax.decoding.generate import Request
from medusa_jax.decoding.state import Engine
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
# Nodes of the first tree without evidence, or where weights are narrow: further rows of a product cost time.
FEW = 3
# Further sizes: at most this much larger than the tree file's choice, this far apart, and by its evidence
# not much slower than the best.
REACH, APART, PROMISING = 2.0, 1.5, 0.85
# Time of a further node in plain steps, before any is measured.
NODE_COST = {"cpu": 0.1, "other": 0.01}
# Calls of a process for which the evidence of a tree file stands: measuring costs more than a process gains that
# decodes little.
AT_FIRST = 8
# Seconds between two notes of one process.
PATIENCE = 30.0


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
    return {n: rows.get(n) or 1 + node * (n - 1) for n in sizes}


def trees_to_try(
    calibrated: Json | None, default: Tree, rows: int, narrow: bool
) -> tuple[dict[int, Tree], int]:
    """A few trees by size, and the size to begin with.

    Without a tree file these are chains: of two drafts, of five, and as deep as the default tree. With
    one, the first nodes of its order: `FEW`, its own choice, and others that its evidence recommends.

    Args:
      default: the drafter's default tree.
      rows: rows decoded at a time.
      narrow: weights are stored narrower than they are computed in.
    """
    if calibrated is None:
        if default.n_nodes != default.depth + 1:  # no chain
            return {default.n_nodes: default}, default.n_nodes
        depths = {min(d, default.depth) for d in (FEW - 1, 5, default.depth)} - {0}
        trees = {d + 1: Tree.chain(d) for d in sorted(depths)}
        return trees, min(trees, default=1)
    platform = jax.default_backend()
    ladder = file_ladder(calibrated, platform)
    own = tree_at(ladder, rows) if ladder else auto_tree(calibrated, platform)
    most, evidence = len(calibrated["growth"]) + 1, ladder_of(calibrated)
    first = min(FEW, most) if evidence else own.n_nodes
    speeds = {
        row["nodes"]: row["tokens_per_step"] / ratio
        for row in evidence
        if (ratio := row.get("step_latency_ratio"))
        and 1 < row["nodes"] <= REACH * own.n_nodes
    }
    sizes = {first, own.n_nodes} - {1}
    for n in sorted(speeds, key=lambda n: -speeds[n]):
        apart = all(max(n, m) >= APART * min(n, m) for m in sizes)
        if apart and speeds[n] > PROMISING * max(speeds.values()):
            sizes.add(n)
    trees = {
        n: own if n == own.n_nodes else tree_of_size(calibrated, n) for n in sorted(sizes)
    }
    return trees, min(first, own.n_nodes) if narrow else own.n_nodes


@dataclass
class Automatic:
    """The automatic trees of a model.

    Attributes:
      calibrated: content of the tree file next to the heads, or None.
      default: the drafter's default tree.
      narrow: as for `trees_to_try`.
      cache: keeps what is learned; None: trees do not follow measurements.
    """

    drafter: Drafter
    calibrated: Json | None
    default: Tree
    narrow: bool
    cache: DeviceCache | None = None
    _calls: int = 0
    _trees: dict[int, tuple[dict[int, Tree], int]] = field(default_factory=dict)
    _made: dict[tuple[Engine, int], Sizes] = field(default_factory=dict)
    _written: dict[str, tuple[int, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, drafter: Drafter, calibrated: Json | None, storage: Storage, *marks: object
    ) -> "Automatic":
        """For a drafter and its tree file.

        Args:
          marks: what else determines the time of a step.
        """
        default = drafter.default_tree
        if not is_automatic():
            return cls(drafter, calibrated, default, narrow=False)
        sizes = tokens_by_size(calibrated), (calibrated or {}).get("growth")
        cache = DeviceCache(
            "trees", 3, drafter.heads, drafter.llama, sizes, storage, *marks
        )
        return cls(drafter, calibrated, default, storage.weights in (STORED, "int8"), cache)

    def trees(self, rows: int) -> tuple[dict[int, Tree], int]:
        """The trees to choose from, by size, without the empty one; and the size to begin with."""
        if rows not in self._trees:
            trees, first = trees_to_try(self.calibrated, self.default, rows, self.narrow)
            fit = {
                n: t for n, t in trees.items() if t.drafted.depth <= self.drafter.n_heads
            }
            self._trees[rows] = fit, min(first, max(fit, default=1))
        return self._trees[rows]

    def _learned(self, rows: int, rule: str) -> Learned:
        trees, first = self.trees(rows)
        note = self.cache.read().get(f"{rows} {rule}") if self.cache else None
        expected, returns = tokens_by_size(self.calibrated), follows_free(self.drafter)
        ratios = expected_ratios(self.calibrated, trees)
        return Learned([1, *trees], first, expected, ratios, returns, note)

    def may_change(self, engine: Engine, rows: Sequence[Options], dtype: np.dtype) -> bool:
        """Whether the tree may change while these rows are decoded.

        Not where the text could depend on it: under rules that read the drafts, with a limit of steps, and in
        16-bit arithmetic, where passes over different numbers of tokens round differently. With a
        constraint the host takes part in every step, and its tree stays the same. With a tree file only
        after `AT_FIRST` calls, and until its step time is measured on this device: chunks of steps cost
        more than changes within a text gain.
        """
        self._calls += 1
        if self._is_settled(len(rows)):
            return False
        exact = engine.rule.lossless and not engine.rule.by_drafts and dtype.itemsize >= 4
        plain = all(o.max_steps is None and o.constraint is None for o in rows)
        return exact and plain and bool(self.trees(len(rows))[0])

    def _is_settled(self, rows: int) -> bool:
        if not ladder_of(self.calibrated):
            return False
        known = self.learned(rows).by_size.values()
        return self._calls <= AT_FIRST or any(f.samples >= KNOWN for f in known)

    def learned(self, rows: int) -> Learned:
        """What this process knows for a number of rows, else what earlier ones learned; under any rule."""
        for (_, n), sizes in self._made.items():
            if n == rows:
                return sizes.learned
        notes = self.cache.read() if self.cache else {}
        kept = [name for name in notes if name.split()[0] == str(rows)]
        return self._learned(rows, kept[0].split()[1] if kept else "")

    def prepare(self, engine: Engine, request: Request) -> Engine:
        """Let a request choose among the sizes; returns its engine, that of the largest."""
        rows = len(request.prompts)
        trees, _ = self.trees(rows)
        largest = trees[max(trees)]
        drafter = self.drafter if largest.drafted.depth else engine.drafter
        key = replace(engine, tree=largest, drafter=drafter), rows
        if key not in self._made:
            learned = self._learned(rows, engine.acceptance)
            keep = partial(self.keep, learned, f"{rows} {engine.acceptance}")
            self._made[key] = Sizes(key[0], trees, learned, keep)
        request.sizes = self._made[key]
        return key[0]

    def tree(self, rows: int) -> Tree:
        """The tree to use where it cannot change: the best one known on this device."""
        return ({1: Tree.none()} | self.trees(rows)[0])[self.learned(rows).best()]

    def keep(self, learned: Learned, name: str) -> None:
        """Keep what was learned: at once if another size is best, else now and then."""
        best, now = learned.best(), time.monotonic()
        before, at = self._written.get(name, (0, -PATIENCE))
        if not self.cache or (best == before and now - at < PATIENCE):
            return
        if note := learned.note():
            self.cache.write(self.cache.read() | {name: note})
            self._written[name] = best, now
