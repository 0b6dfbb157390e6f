"""The number of tree nodes for the next decode steps, chosen by measurements of the running process.

Text does not depend on the tree under a lossless rule, so the tree may change between chunks of steps. A
size of n nodes decodes tokens_per_step(n) / step_ratio(n) times as fast as plain decoding (size 1), where
step_ratio(n) is the time of its step over the time of a plain step. Other work on the machine changes
times within seconds, so only chunks next to each other are compared.

Nothing here calls JAX or reads a clock. One unit of time is a plain step.
"""

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from medusa_jax.whole_files import Json

# Change to a size only if it is faster by this factor; plain decoding is the choice in doubt.
MARGIN = 1.03
# Samples of a ratio to keep, and what an expected ratio and an earlier process's count as: the median of few
# follows the machine, and one sample of a busy moment changes nothing.
SAMPLES, EXPECTED, KNOWN = 9, 2, 3
# A sample counts if chunks of one size around it differ by no more: the machine's load was the same.
STEADY = 1.25
# Least ratio: a busy machine may show less, and drafts that gain less than this are not worth the risk.
LEAST_RATIO = 1.08
# Steps after which figures of the current text, and those of all texts, count half.
RECENT, LONG = 32, 1024
# Steps that the figures of earlier texts count for in a new one; steps after which its own are believed.
PRIOR, ENOUGH = 2, 8
# Steps of a text between two trials of another size, doubled while trials change nothing.
SOON, SELDOM = 24, 1024
# Plain steps between two trials of drafts, doubled while drafts lose.
PAUSES = (64, 512)
# Trials may cost this many plain steps at first, and this share of the time afterwards.
FREE, SHARE = 4.0, 0.01
# A trial of drafts ends at once below this speed-up; sizes with this share of the current speed are tried.
HOPELESS, NEAR = 0.8, 0.7
# Seconds of a short chunk, and its limits in steps. Other chunks double up to the caller's limit.
CHUNK_SECONDS, CHUNK_STEPS = 0.02, (4, 16)


class Chunk(NamedTuple):
    """The next decode steps.

    Attributes:
      size: nodes of their tree; 1 is plain decoding.
      steps: maximum number of steps.
      apart: run them on a copy of the state and drop the result; only their time is wanted.
      trial: they try a size that may be slower.
    """

    size: int
    steps: int
    apart: bool = False
    trial: bool = False


@dataclass
class Figures:
    """Measurements of one size.

    Attributes:
      ratios: the last samples of its step time over a plain step's.
      tokens, steps: sums over rows; older ones count less.
      samples, trials: how often the ratio was measured, and the size tried.
    """

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    tokens: float = 0.0
    steps: float = 0.0
    samples: int = 0
    trials: int = 0

    @property
    def per_step(self) -> float | None:
        """Tokens per step, if there were enough steps."""
        return self.tokens / self.steps if self.steps >= ENOUGH else None

    def add(self, tokens: float, steps: float, keep: float) -> None:
        """Add steps; older ones keep this share of their weight."""
        self.tokens, self.steps = keep * self.tokens + tokens, keep * self.steps + steps


class Learned:
    """What a process knows of the sizes of one drafter, over all requests.

    Args:
      sizes: numbers of nodes, ascending, 1 first.
      start: the best size as far as a tree file tells.
      expected: tokens per step by size from a tree file; {} if there is none.
      ratios: expected step time by size over a plain step's.
      returns: whether drafts may follow plain steps in the same text, since plain steps keep the
        drafter's state at no cost.
      note: the result of `note` in an earlier process.

    Attributes:
      elapsed, spent: time of all steps, and the part that trials have cost.
      seconds: of the last timed step.
      pause, rest: plain steps between two trials of drafts, and those left until the next.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        start: int,
        expected: Mapping[int, float],
        ratios: Mapping[int, float],
        returns: bool,
        note: Json | None = None,
    ) -> None:
        self.sizes, self.start, self.returns = list(sizes), start, returns
        self.expected = dict(expected)
        self.expected_ratios = {1: 1.0} | dict(ratios)
        self.by_size = {n: Figures() for n in sizes}
        self.elapsed = self.spent = self.seconds = 0.0
        self.pause, self.rest = PAUSES[0], 0
        kept = (note or {}).get("sizes", {})
        for n, figures in self.by_size.items():
            figures.ratios.extend([self.expected_ratios[n]] * EXPECTED)
            ratio, per_step = kept.get(str(n), (None, None))
            if ratio:
                figures.ratios.extend([ratio] * KNOWN)
                figures.samples = KNOWN
            if per_step:
                figures.add(2 * ENOUGH * per_step, 2 * ENOUGH, 1)

    def note(self) -> Json:
        """Ratio and tokens per step by size, for a later process; {} if no ratio is known."""
        found = {}
        for n in self.sizes[1:]:
            figures = self.by_size[n]
            if figures.samples or figures.per_step:
                ratio = round(self.ratio(n), 4) if figures.samples >= KNOWN else None
                found[str(n)] = [ratio, figures.per_step and round(figures.per_step, 4)]
        return {"sizes": found} if any(ratio for ratio, _ in found.values()) else {}

    def ratio(self, n: int) -> float:
        """Step time of a size over a plain step's: the median sample, the higher one of two.

        That of a size without samples follows from the nearest one with samples.
        """
        measured = [m for m in self.sizes[1:] if self.by_size[m].samples]
        if n == 1:
            return 1.0
        if n in measured or not measured:
            return max(LEAST_RATIO, statistics.median_high(self.by_size[n].ratios))
        m = min(measured, key=lambda m: abs(m - n))
        own, other = (self.expected_ratios[k] - 1 for k in (n, m))
        return max(LEAST_RATIO, 1 + (self.ratio(m) - 1) * own / other)

    def transfer(self, per_step: float, m: int, n: int) -> float:
        """Tokens per step of size n on a text where size m has `per_step`.

        Both count as chains whose accuracies keep the proportion that they usually have.
        """
        if m == n or n == 1:
            return per_step if m == n else 1.0
        accuracy = chain_accuracy(per_step, m)
        usual = [self.expected.get(k) or self.by_size[k].per_step for k in (m, n)]
        if all(usual):
            own, other = (chain_accuracy(a or 1, k) for a, k in zip(usual, (m, n)))
            accuracy *= other / max(own, 0.01)
        return chain_tokens(min(accuracy, 1.0), n)

    def usual(self, n: int) -> float:
        """Tokens per step of a size over the texts so far, else by the tree file; 0 if unknown."""
        known = [m for m in self.sizes[1:] if self.by_size[m].per_step]
        if n == 1 or not known:
            return 1.0 if n == 1 else self.expected.get(n, 0.0)
        m = max(known, key=lambda m: self.by_size[m].steps)
        own, moved = self.by_size[n], self.transfer(self.by_size[m].per_step or 1.0, m, n)
        return (own.tokens + RECENT * moved) / (own.steps + RECENT)

    def best(self) -> int:
        """The fastest measured size over the texts so far; at first `start`."""
        measured = [n for n in self.sizes[1:] if self.by_size[n].samples] or [self.start]
        speeds = {n: self.usual(n) / self.ratio(n) for n in measured}
        best = max(speeds, key=lambda n: speeds[n])
        return best if speeds[best] > MARGIN or not speeds[best] else 1

    @property
    def first(self) -> int:
        """The size that a text begins with: plain steps or few nodes, which cost least where drafts are wrong."""
        return min(self.best(), self.sizes[1])


class Chooser:
    """Chooses sizes for one request, and adds its measurements to what is learned.

    Attributes:
      current: the size between trials.
    """

    def __init__(self, learned: Learned) -> None:
        self.learned = learned
        self.current = learned.first
        if learned.returns:  # drafts may win in a new text, and a trial costs little
            learned.rest = min(learned.rest, PAUSES[0])
        self.recent = {n: Figures() for n in learned.sizes}
        self._plan: deque[Chunk] = deque()
        self._trying: int | None = None
        self._wait = self._left = SOON
        self._length = self._first_length
        self._last: deque[tuple[int, float]] = deque(maxlen=3)
        self._begun, self._taken = False, 0

    @property
    def dropped(self) -> bool:
        """Whether the rest of the text is plain, since the drafter's state has been left behind."""
        return self._begun and self.current == 1 and not self.learned.returns

    @property
    def _short(self) -> int:
        """Steps of a short chunk."""
        least, most = CHUNK_STEPS
        return min(max(int(CHUNK_SECONDS / (self.learned.seconds or 1)), least), most)

    @property
    def _first_length(self) -> int:
        """Steps of the first chunk with a size: few with drafts, which may be wrong."""
        return SOON if self.current == 1 else self._short

    def next(self, ready: Callable[[int], bool], most: int) -> Chunk:
        """The next chunk.

        Args:
          ready: whether the program of a size is compiled.
          most: maximum number of steps, unless a trial takes fewer.
        """
        if not self.dropped:
            self._decide(ready)
        self._begun = True
        if self._plan:
            return self._plan.popleft()
        steps = min(self._length, most)
        if self.current == 1 or self.recent[self.current].steps >= ENOUGH:
            self._length = min(2 * steps, most)
        return Chunk(self.current, steps)

    def wanted(self) -> list[int]:
        """Sizes whose programs should be compiled, the most important first.

        A compilation slows decoding down, and the process waits for it at its end. So none starts at the beginning
        of a text, which may be short, and none of a larger tree in a process that decodes little.
        """
        if self._taken < SOON:
            return []
        if self.current == 1:
            return [self.learned.sizes[1]]
        now = self.speed(self.current)
        plain = [1] if now < 1.2 or self._left <= 0 else []
        if self.learned.elapsed < LONG / 2:
            return plain
        return plain + [n for n in self._others() if n > 1 and self.speed(n) > MARGIN * now]

    def report(
        self, chunk: Chunk, rounds: int, steps: float, tokens: float, seconds: float | None
    ) -> None:
        """Add the figures of a finished chunk, in the order in which chunks ran.

        Args:
          rounds: steps that the loop took.
          steps, tokens: sums of steps and new tokens over the rows.
          seconds: time of the chunk; None if it was not measured alone.
        """
        learned, size = self.learned, chunk.size
        if not rounds:
            return
        self._time(size, seconds / rounds if seconds else None)
        if chunk.apart:
            learned.spent += rounds
            return
        ratio = learned.ratio(size)
        if chunk.trial:  # the current size, or plain steps, would have needed less time
            usual = 1.0 if size == self.current else self.speed(self.current)
            needed = rounds * tokens / max(steps, 1) / (usual or 1)
            learned.spent += max(0.0, rounds * ratio - needed)
        for n, figures in self.recent.items():
            figures.add(tokens * (n == size), steps * (n == size), 0.5 ** (rounds / RECENT))
        learned.by_size[size].add(tokens, steps, 0.5 ** (rounds / LONG))
        keep = 0.5 ** (rounds / (4 * LONG))
        learned.elapsed = keep * learned.elapsed + rounds * ratio
        learned.spent *= keep
        learned.rest -= rounds
        self._left -= rounds
        self._taken += rounds

    def _time(self, size: int, seconds: float | None) -> None:
        """Keep the time of a step; take a sample of y over x from chunks x, y, x and x, y, y."""
        if seconds is None:
            self._last.clear()
            return
        self.learned.seconds = seconds
        self._last.append((size, seconds))
        if len(self._last) < 3:
            return
        (x, first), (y, second), (z, third) = self._last
        around = (first, third) if x == z else (second, third)
        if x == y or z not in (x, y) or max(around) > STEADY * min(around):
            return
        sample = 2 * second / (first + third) if x == z else (second + third) / (2 * first)
        drafts, ratio = (max(x, y), sample if x == 1 else 1 / sample)
        if 1 not in (x, y):
            drafts, ratio = y, sample * self.learned.ratio(x)
        self.learned.by_size[drafts].ratios.append(ratio)
        self.learned.by_size[drafts].samples += 1

    def tokens(self, n: int) -> float:
        """Tokens per step of a size on this text, by its last steps and earlier texts; 0 if unknown."""
        if n == 1:
            return 1.0
        learned = self.learned
        m = max(learned.sizes[1:], key=lambda k: self.recent[k].steps)
        base, usual = self.recent[m], learned.usual(m)
        weight = PRIOR if usual else 0
        if base.steps + weight == 0:
            return learned.usual(n)
        found = (base.tokens + weight * usual) / (base.steps + weight)
        if n == m:
            return found
        own = self.recent[n]
        return (own.tokens + ENOUGH * learned.transfer(found, m, n)) / (own.steps + ENOUGH)

    def speed(self, n: int) -> float:
        """Speed-up of a size on this text over plain decoding; 0 if unknown."""
        return self.tokens(n) / self.learned.ratio(n)

    def _others(self) -> list[int]:
        """The other sizes, the most promising first."""
        others = [n for n in self.learned.sizes if n != self.current]
        return sorted(others, key=self.speed, reverse=True)

    def _decide(self, ready: Callable[[int], bool]) -> None:
        """Change the size, or plan a trial of another one."""
        learned, before = self.learned, self.current
        if self._plan and not self._is_hopeless(ready):
            return
        self._plan.clear()
        self.current = self._fastest(ready)
        changed = self.current != before
        if changed:
            self._length = self._first_length
        if self._trying:
            least, most = PAUSES
            learned.pause = min(2 * learned.pause, most) if self.current == 1 else least
            learned.rest = learned.pause
            self._wait = SOON if changed else min(2 * self._wait, SELDOM)
            self._left, self._trying = self._wait, None
        if learned.spent > FREE + SHARE * learned.elapsed or self.dropped:
            return
        if (other := self._candidate(ready)) is not None:
            self._try(other)

    def _is_hopeless(self, ready: Callable[[int], bool]) -> bool:
        """Whether a trial only wastes time: its drafts are wrong."""
        drafts = max(self._trying or 1, self.current)
        enough = self.recent[drafts].steps >= ENOUGH / 2
        return enough and self.speed(drafts) < HOPELESS and ready(1)

    def _fastest(self, ready: Callable[[int], bool]) -> int:
        if self.current > 1 and not self.recent[self.current].steps:
            return self.current
        # A size that was never measured is tried first.
        known = [n for n in self.learned.sizes if n == 1 or self.learned.by_size[n].samples]
        speeds = {n: self.speed(n) for n in known if ready(n)}
        best = max(speeds, key=lambda n: speeds[n], default=self.current)
        needed = (1.0 if best == 1 else MARGIN) * self.speed(self.current)
        return best if speeds.get(best, 0.0) > needed else self.current

    def _candidate(self, ready: Callable[[int], bool]) -> int | None:
        """A size to try now."""
        learned, others = self.learned, [n for n in self._others() if ready(n)]
        now = self.speed(self.current)
        new = [n for n in others if not learned.by_size[n].samples and n > 1]
        if self._begun and new and self.speed(new[0]) > MARGIN**2 * now:
            return new[0]
        at_once = not self._begun and self.current == 1 and not learned.returns
        waits = learned.rest > 0 and self.current == 1
        if not others or waits or (self._left > 0 and not at_once):
            return None
        # In turn, since a ratio that was measured on a busy machine may be wrong.
        near = [n for n in others if self.speed(n) >= NEAR * now] or others[:1]
        return min(near, key=lambda n: learned.by_size[n].trials)

    def _try(self, other: int) -> None:
        """Plan chunks of two sizes in turn; one more chunk lets the last of them be reported."""
        learned, k = self.learned, self._short
        # Each chunk costs the host about half a step, so chunks of plain steps, which risk nothing, are longer.
        steps = CHUNK_STEPS[1] if self.current == 1 else k
        now, trial = Chunk(self.current, steps), Chunk(other, k, trial=True)
        if learned.returns or 1 not in (other, self.current):
            known = learned.by_size[max(other, self.current)].samples >= KNOWN
            self._plan.extend([trial, now] * (1 if known else 2) + [now])
        elif self.current == 1:  # the drafter's state is whole only at the beginning
            self._plan.extend([trial, trial])
            self.current, self._length = other, k
        else:  # plain steps would leave the drafter's state behind
            plain = Chunk(1, max(ENOUGH, k), apart=True)
            self._plan.extend([now, plain, now, now])
        learned.by_size[other].trials += 1
        self._trying = other


def chain_accuracy(per_step: float, nodes: int) -> float:
    """p of a chain whose drafts are each right with probability p: per_step = 1 + p + ... + p^(nodes - 1)."""
    low, high = 0.0, 1.0
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if chain_tokens(middle, nodes) < per_step else (low, middle)
        )
    return (low + high) / 2


def chain_tokens(p: float, nodes: int) -> float:
    """Tokens per step of a chain whose drafts are each right with probability p."""
    return float(nodes) if p > 1 - 1e-6 else (1 - p**nodes) / (1 - p)
