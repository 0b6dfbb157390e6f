"""`--tree auto`: the trees that decoding chooses from, and what earlier processes learned of them.

A drafter without a tree file is gated (`decoding/gate.py`): each step drafts a short chain, a long one, or
nothing. With a tree file the tree stays the same, since its evidence says how many tokens each size
gives; how long a step takes is measured on the user's device by the requests themselves, plain ones (as of
`--compare`) among them. It is kept in the user's cache directory, and the next process begins with it.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import jax
import numpy as np

from medusa_jax.api.results import Options
from medusa_jax.arch import STORED
from medusa_jax.decoding.gate import Gate
from medusa_jax.decoding.generate import Request
from medusa_jax.decoding.state import Engine, Progress
from medusa_jax.decoding.stopping import RUNNING
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
# By measurements on this device, a tree may become this much larger than the tree file's choice, and must be
# faster than plain decoding by this factor.
REACH, MARGIN = 2.0, 1.03
# Time of a further node in plain steps, before any is measured, and least ratio of a step with drafts.
NODE_COST, LEAST_RATIO = {"cpu": 0.15, "other": 0.02}, 1.05
# Samples of a ratio to keep of each size, and number from which their median counts.
SAMPLES, KNOWN = 9, 3
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
    return {1: 1.0} | {n: rows.get(n) or 1 + node * (n - 1) for n in sizes if n > 1}


class Learned:
    """Times of steps on this device with a number of rows, and how often drafts are right.

    Args:
      expected: expected time of a step by size over a plain step's.
      note: the result of `note` in an earlier process.

    Attributes:
      accuracy: p of `decoding/gate.py` over all texts.
    """

    def __init__(self, expected: Mapping[int, float], note: Json) -> None:
        self.expected = dict(expected)
        self.noted, self.accuracy = dict[int, float](), 0.5
        with suppress(AttributeError, TypeError, ValueError):  # a damaged note
            noted = {int(n): float(ratio) for n, ratio in note.get("ratios", {}).items()}
            self.accuracy = float(note.get("accuracy", 0.5))
            self.noted = noted
        self.samples: dict[int, deque[float]] = {}
        self._last = 0, 0.0

    def add(self, size: int, seconds: float) -> None:
        """Add the time of a step, the mean over some that took trees of one size.

        Only neighbours in time are compared: the load of the machine changes within seconds.
        """
        last, before = self._last
        self._last = size, seconds
        if last != size and 1 in (last, size):
            drafts, ratio = (
                (last, before / seconds) if size == 1 else (size, seconds / before)
            )
            self.samples.setdefault(drafts, deque(maxlen=SAMPLES)).append(ratio)

    @property
    def measured(self) -> dict[int, float]:
        """Ratios by size that this process or an earlier one has measured."""
        known = {
            n: median(found) for n, found in self.samples.items() if len(found) >= KNOWN
        }
        return self.noted | known

    def ratio(self, n: int) -> float:
        """Time of a step over a plain step's; a size that was not measured follows the nearest one."""
        measured = self.measured
        if n == 1 or not measured:
            return self.expected.get(n, 1.0)
        m = min(measured, key=lambda m: abs(m - n))
        own, other = (self.expected.get(k, 1.0) - 1 for k in (n, m))
        return max(LEAST_RATIO, 1 + (measured[m] - 1) * (own / other if other > 0 else 1))

    def note(self) -> Json:
        """What a later process begins with; {} if nothing is measured."""
        ratios = {str(n): round(ratio, 3) for n, ratio in self.measured.items()}
        return ratios and {"ratios": ratios, "accuracy": round(self.accuracy, 3)}


@dataclass
class Watch:
    """Times the steps of one request.

    Attributes:
      sizes: nodes of the trees that steps take; of a gated engine in its order.
      keep: called at the end of the request.
    """

    learned: Learned
    sizes: Sequence[int]
    keep: Callable[[], None]
    _since: float | None = None
    _steps: np.ndarray | int = 0

    def begin(self) -> None:
        """The decode loop starts now."""
        self._since = now()

    def see(self, progress: Progress) -> None:
        """Wait for the result of a loop, and time it if it is not ready yet."""
        late = is_ready(progress)
        jax.block_until_ready(progress)
        before, self._since = self._since, now()
        gate = progress.gate
        steps = (
            np.asarray(progress.steps_B).max(keepdims=True)
            if gate is None
            else gate.steps_N
        )
        new_N = np.asarray(steps) - self._steps
        self._steps += new_N
        taken = np.flatnonzero(new_N).tolist()
        if before and not late and len(taken) == 1:
            seconds = (self._since - before) / int(new_N[taken[0]])
            self.learned.add(self.sizes[taken[0]], seconds)
        if not (np.asarray(progress.status_B) == RUNNING).any():
            if gate is not None:
                found = float(np.asarray(gate.right_1)[0] / np.asarray(gate.tested_1)[0])
                self.learned.accuracy = (self.learned.accuracy + found) / 2
            self.keep()


def is_ready(progress: Progress) -> bool:
    """Whether a loop has already ended, so that nobody knows when."""
    return progress.n_new_B.is_ready()  # type: ignore[attr-defined]


def now() -> float:
    """Seconds; on a CPU those that this process has computed, which other processes lengthen little."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()


@dataclass
class Automatic:
    """The automatic trees of a model.

    Attributes:
      calibrated: content of the tree file next to the heads, or None.
      narrow: weights are stored narrower than they are computed in.
      cache: keeps what is learned; None: nothing is learned, and all steps take the same tree.
    """

    drafter: Drafter
    calibrated: Json | None
    narrow: bool
    cache: DeviceCache | None = None
    _learned: dict[int, Learned] = field(default_factory=dict)
    _trees: dict[int, Tree] = field(default_factory=dict)
    _written: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, drafter: Drafter, calibrated: Json | None, storage: Storage, *marks: object
    ) -> "Automatic":
        """For a drafter and its tree file.

        Args:
          marks: what else determines the time of a step.
        """
        narrow = storage.weights in (STORED, "int8")
        if not is_automatic():
            return cls(drafter, calibrated, narrow)
        sizes = tokens_by_size(calibrated), (calibrated or {}).get("growth")
        cache = DeviceCache(
            "trees", 4, drafter.heads, drafter.llama, sizes, storage, *marks
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

    def learned(self, rows: int) -> Learned:
        """What is known for a number of rows."""
        if rows not in self._learned:
            if self.calibrated is None:
                sizes = [tree.n_nodes for tree in self.gated]
            else:
                sizes = [self._own(rows).n_nodes, *tokens_by_size(self.calibrated)]
            note = self.cache.read().get(str(rows), {}) if self.cache else {}
            expected = expected_ratios(self.calibrated, sizes)
            self._learned[rows] = Learned(expected, note)
        return self._learned[rows]

    def tree(self, rows: int) -> Tree:
        """The tree of steps that are not gated: the fastest, as known when it was first asked for.

        A tree file's own choice stands until a step with it, and a plain one, have been timed on this device.
        """
        if rows not in self._trees:
            self._trees[rows] = self._fastest(rows)
        return self._trees[rows]

    def _own(self, rows: int) -> Tree:
        """The tree file's choice."""
        assert self.calibrated is not None
        platform = jax.default_backend()
        ladder = file_ladder(self.calibrated, platform)
        return tree_at(ladder, rows) if ladder else auto_tree(self.calibrated, platform)

    def _fastest(self, rows: int) -> Tree:
        learned = self.learned(rows)
        if self.calibrated is None:
            p = learned.accuracy
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
        request: Request,
        auto: bool,
    ) -> Engine:
        """Time a request's steps, and let it choose among trees where its text cannot depend on them.

        It could under rules that read the drafts, with a limit of steps, and in 16-bit arithmetic, where
        passes over different numbers of tokens round differently. With a constraint the host takes part
        in every step. A tree file's tree stays, since programs with several take longer to compile.

        Args:
          auto: the caller asked for no other tree.
        """
        B, learned = len(rows), self.learned(len(rows))
        sizes: tuple[int, ...] = (engine.tree.n_nodes,)
        free = all(o.max_steps is None and o.constraint is None for o in rows)
        exact = engine.rule.lossless and not engine.rule.by_drafts and dtype.itemsize >= 4
        if (trees := self.gated) and self.cache and auto and free and exact:
            engine = replace(engine, drafter=self.drafter, tree=trees[-1], gated=trees)
            sizes = tuple(tree.n_nodes for tree in trees)
            ratios = [learned.ratio(n) for n in sizes]
            p = learned.accuracy
            request.gate = Gate.before_text(trees, self.drafter, B, ratios, p)
        if auto:
            request.sizes = sizes
        if self.cache and free and all(n in learned.expected for n in sizes):
            request.watch = Watch(learned, sizes, partial(self.keep, learned, B))
        return engine

    def keep(self, learned: Learned, rows: int) -> None:
        """Keep what was learned, now and then."""
        at = time.monotonic()
        if not self.cache or at - self._written.get(rows, -PATIENCE) < PATIENCE:
            return
        if note := learned.note():
            self.cache.write(self.cache.read() | {str(rows): note})
            self._written[rows] = at
