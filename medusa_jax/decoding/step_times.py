"""Times of steps on this device, as requests take them (for `api/automatic.py`)."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import jax
import numpy as np

from medusa_jax.decoding.state import Progress
from medusa_jax.decoding.stopping import RUNNING
from medusa_jax.whole_files import Json

# Least time of a step with drafts over a plain step's.
LEAST_RATIO = 1.05
# Samples of a ratio to keep of each size, and number from which their median counts.
SAMPLES, KNOWN = 9, 3


class Learned:
    """Times of steps on this device with a number of rows, and how often drafts are right.

    Args:
      expected: expected time of a step by size over a plain step's.
      note: the result of `note` in an earlier process.

    Attributes:
      acceptance_rate: p of `gate.py` over all texts.
      changed: whether a sample was added since `note`.
    """

    def __init__(self, expected: Mapping[int, float], note: Json) -> None:
        self.expected = dict(expected)
        self.samples, self.acceptance_rate = dict[int, deque[float]](), 0.5
        with suppress(AttributeError, TypeError, ValueError):  # a damaged note
            samples = {
                int(n): deque(map(float, found), SAMPLES)
                for n, found in note.get("ratios", {}).items()
            }
            self.acceptance_rate = float(note.get("acceptance_rate", 0.5))
            self.samples = samples
        self._last, self.changed = (0, 0.0), False

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
            self.changed = True

    @property
    def measured(self) -> dict[int, float]:
        """Ratios by size that this process or an earlier one has measured."""
        return {
            n: median(found) for n, found in self.samples.items() if len(found) >= KNOWN
        }

    def ratio(self, n: int) -> float:
        """Time of a step over a plain step's; a size that was not measured follows the nearest one."""
        measured = self.measured
        if n == 1 or not measured:
            return self.expected.get(n, 1.0)
        m = min(measured, key=lambda m: abs(m - n))
        own, other = (self.expected.get(k, 1.0) - 1 for k in (n, m))
        return max(LEAST_RATIO, 1 + (measured[m] - 1) * (own / other if other > 0 else 1))

    def note(self) -> Json:
        """The samples and the acceptance rate, for a later process; {} without samples."""
        self.changed = False
        ratios: Json = {
            str(n): [round(x, 3) for x in found] for n, found in self.samples.items()
        }
        return ratios and {
            "ratios": ratios,
            "acceptance_rate": round(self.acceptance_rate, 3),
        }


@dataclass
class Watch:
    """Times the steps of one request.

    Attributes:
      sizes: nodes of the trees that steps take; of a gated engine in its order.
      keep: called at the end of a request that has added samples.
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
                found = float(np.asarray(gate.accepted_1)[0] / np.asarray(gate.tested_1)[0])
                mean = (self.learned.acceptance_rate + found) / 2
                self.learned.acceptance_rate = mean
            if self.learned.changed:
                self.keep()


def is_ready(progress: Progress) -> bool:
    """Whether a loop has already ended, so that its end was not observed."""
    return progress.n_new_B.is_ready()  # type: ignore[attr-defined]


def now() -> float:
    """Seconds; on a CPU this process's own computing time, which other processes hardly change."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()
