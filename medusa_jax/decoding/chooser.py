"""The number of tree nodes for the next decode steps, chosen by measurements of the running process.

Text does not depend on the tree under a lossless rule, so the tree may change between chunks of steps. A
size of n nodes decodes tokens_per_step(n) / step_ratio(n) times as fast as plain decoding (size 1), where
step_ratio(n) is the time of its step over the time of a plain step. Other work on the machine changes
times within seconds, so only chunks next to each other are compared: x, y, x gives a sample of y over x.

Nothing here calls JAX or reads a clock: `Chooser.report` takes figures, `Chooser.next` returns a size.
One unit of time is a plain step.
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from medusa_jax.whole_files import Json

# Change to a size only if it is faster by this factor.
MARGIN = 1.03
# Most samples of a ratio to keep: the median of few recent ones follows the machine.
SAMPLES = 9
# Steps after which figures of the current text, and those of all texts, count half.
RECENT, LONG = 32, 1024
# Steps that count as one observation of the figures known before a text.
PRIOR = 2
# A sample counts if the chunks around it differ by no more than this: the load of the machine was the same.
STEADY = 1.25
# Steps of a text between two trials of another size: doubled while trials change nothing.
SOON, SELDOM = 24, 1024
# Trials may cost this many plain steps at first, and this share of the time afterwards.
FREE, SHARE = 4.0, 0.01
# Seconds and steps of a chunk in a trial, and of the first one after a change; chunks double up to the
# caller's limit.
CHUNK_SECONDS, CHUNK_STEPS = 0.02, (4, 16)
# Steps with drafts after which their figures are believed.
ENOUGH = 8
# Fewer tokens per step than this cannot pay for drafts on any device.
LEAST_TOKENS = 1.08
# Least time of a further node, in plain steps; a few nodes more cost little on an accelerator.
NODE_COST = 0.02
# A trial of drafts ends early below this speed-up.
HOPELESS = 0.8
# Sizes that are at least this fast, compared with the current one, are tried in turn.
NEAR = 0.7


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
      trials: how often it was tried.
    """

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    tokens: float = 0.0
    steps: float = 0.0
    trials: int = 0

    @property
    def ratio(self) -> float | None:
        """The median sample, the higher one of two."""
        return statistics.median_high(self.ratios) if self.ratios else None

    @property
    def per_step(self) -> float | None:
        return self.tokens / self.steps if self.steps >= ENOUGH else None

    def add(self, tokens: float, steps: float, keep: float) -> None:
        """Add steps; older ones keep this share of their weight."""
        self.tokens, self.steps = keep * self.tokens + tokens, keep * self.steps + steps


class Learned:
    """What a process knows of the sizes of one drafter, over all requests.

    Attributes:
      seconds: of the last timed step.

    Args:
      sizes: numbers of nodes, ascending, 1 first.
      start: the size to begin with.
      expected: tokens per step by size from a tree file; {} if there is none.
      returns: whether drafts may follow plain steps in the same text, since plain steps keep the
        drafter's state at no cost.
      note: the result of `note` in an earlier process.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        start: int,
        expected: Mapping[int, float],
        returns: bool,
        note: Json | None = None,
    ) -> None:
        self.sizes, self.start, self.returns = list(sizes), start, returns
        self.expected = dict(expected)
        self.by_size = {n: Figures() for n in sizes}
        self.elapsed = self.spent = 0.0
        self.seconds: float | None = None
        for name, (ratio, per_step) in (note or {}).get("sizes", {}).items():
            if figures := self.by_size.get(int(name)):
                figures.ratios.extend([ratio] * (SAMPLES // 3) if ratio else ())
                figures.add(
                    *((per_step * 2 * ENOUGH, 2 * ENOUGH) if per_step else (0, 0)), 1
                )

    def note(self) -> Json:
        """Ratio and tokens per step by size, for a later process; {} if no ratio was measured."""
        found = {
            str(n): [f.ratio and round(f.ratio, 4), f.per_step and round(f.per_step, 4)]
            for n, f in self.by_size.items()
            if n > 1 and (f.ratio or f.per_step)
        }
        measured = any(ratio for ratio, _ in found.values())
        return {"sizes": found} if measured else {}

    def ratio(self, n: int) -> float | None:
        """Measured step time of a size over a plain step's.

        More nodes never take less time, whatever a busy machine shows.
        """
        if n == 1 or (found := self.by_size[n].ratio) is None:
            return 1.0 if n == 1 else None
        return max(found, min(1 + NODE_COST * (n - 1), 1.1))

    def likely_ratio(self, n: int) -> float | None:
        """The same; for a size without samples an optimistic estimate by its nearest measured one."""
        if (own := self.ratio(n)) is not None:
            return own
        known = [m for m in self.sizes[1:] if self.ratio(m)]
        if not known:
            return None
        m = min(known, key=lambda m: abs(m - n))
        slope = ((self.ratio(m) or 1) - 1) / (m - 1)
        return max(1.0, 1 + 0.8 * slope * (n - 1))

    def transfer(self, per_step: float, m: int, n: int) -> float:
        """Tokens per step of size n on a text where size m has `per_step`."""
        if m == n or n == 1:
            return per_step if m == n else 1.0
        here = chain_accuracy(per_step, m)
        known = [self.expected.get(k) or self.by_size[k].per_step for k in (m, n)]
        if all(known):
            own, other = (chain_accuracy(a or 1, k) for a, k in zip(known, (m, n)))
            here *= other / max(own, 0.01)
        return chain_tokens(min(here, 1.0), n)

    def usual(self, n: int) -> float | None:
        """Tokens per step of a size over the texts so far, else by the tree file."""
        if n == 1:
            return 1.0
        known = [m for m in self.sizes[1:] if self.by_size[m].per_step]
        if not known:
            return self.expected.get(n)
        m = max(known, key=lambda m: self.by_size[m].steps)
        own, moved = self.by_size[n], self.transfer(self.by_size[m].per_step or 1.0, m, n)
        return (own.tokens + RECENT * moved) / (own.steps + RECENT)

    @property
    def affordable(self) -> bool:
        """Whether trials have cost little so far."""
        return self.spent <= FREE + SHARE * self.elapsed

    def best(self) -> int:
        """The fastest size over the texts so far; `start` if nothing has been measured."""
        speeds = {
            n: (self.usual(n) or 0) / ratio for n in self.sizes if (ratio := self.ratio(n))
        }
        if len(speeds) == 1:
            return self.start
        return max(speeds, key=lambda n: speeds[n] / (1.0 if n == 1 else MARGIN))


class Chooser:
    """Chooses sizes for one request, and adds its measurements to what is learned."""

    def __init__(self, learned: Learned) -> None:
        self.learned = learned
        # A text begins with few nodes: those of a larger tree cost most where drafts are wrong.
        self.current = min(learned.best(), learned.sizes[1])
        self.recent = {n: Figures() for n in learned.sizes}
        self._plan: deque[Chunk] = deque()
        self._length, self._trying = self._short, 0
        self._wait = self._left = float(SOON)
        self._last: deque[tuple[int, float]] = deque(maxlen=3)
        self._begun, self._taken = False, 0

    @property
    def _short(self) -> int:
        """Steps of a short chunk."""
        least, most = CHUNK_STEPS
        return min(max(int(CHUNK_SECONDS / (self.learned.seconds or 1)), least), most)

    @property
    def dropped(self) -> bool:
        """Whether the rest of the text is plain, since the drafter's state has been left behind."""
        return self._begun and self.current == 1 and not self.learned.returns

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

        None at the beginning of a text, which may be short: the process waits for a compilation at its end.
        """
        if self.dropped or self._taken < SOON:
            return []
        others = [n for n in self._others() if self._promising(n)]
        if self.current > 1:
            speed = self.speed(self.current)
            if speed is None or speed < 1.1:
                others.insert(0, 1)
        return others

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
        ratio, now = learned.ratio(size) or 1.0, self.speed(self.current) or 1.0
        if chunk.apart:
            learned.spent += rounds
            return
        if chunk.trial:  # the current size would have needed less time
            learned.spent += max(
                0.0, rounds * ratio - rounds * tokens / max(steps, 1) / now
            )
        for n, figures in self.recent.items():
            mine = (tokens, steps) if n == size else (0.0, 0.0)
            figures.add(*mine, 0.5 ** (rounds / RECENT))
        keep = 0.5 ** (rounds / (4 * LONG))
        learned.by_size[size].add(tokens, steps, 0.5 ** (rounds / LONG))
        learned.elapsed = keep * learned.elapsed + rounds * ratio
        learned.spent *= keep
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
        if 1 in (x, y):
            self.learned.by_size[max(x, y)].ratios.append(sample if x == 1 else 1 / sample)
        elif other := self.learned.ratio(x):
            self.learned.by_size[y].ratios.append(sample * other)

    def tokens(self, n: int) -> float | None:
        """Tokens per step of a size on this text, by its last steps and earlier texts."""
        if n == 1:
            return 1.0
        usual = self.learned.usual
        m = max(self.learned.sizes[1:], key=lambda k: self.recent[k].steps)
        base = self.recent[m]
        if base.steps + (PRIOR if usual(m) else 0) == 0:
            return usual(n)
        prior = usual(m)
        weight = PRIOR if prior else 0
        found = (base.tokens + weight * (prior or 0)) / (base.steps + weight)
        if n == m:
            return found
        own, weight = self.recent[n], ENOUGH
        moved = self.learned.transfer(found, m, n)
        return (own.tokens + weight * moved) / (own.steps + weight)

    def speed(self, n: int) -> float | None:
        """Speed-up of a measured size on this text over plain decoding."""
        ratio, tokens = self.learned.ratio(n), self.tokens(n)
        return tokens / ratio if ratio and tokens else None

    def _likely_speed(self, n: int) -> float:
        """The same, optimistic for a size that was not measured."""
        ratio, tokens = self.learned.likely_ratio(n), self.tokens(n)
        return tokens / ratio if ratio and tokens else 0.0

    def _others(self) -> Iterable[int]:
        """The other sizes, the most promising first."""
        others = (n for n in self.learned.sizes if n != self.current)
        return sorted(others, key=self._likely_speed, reverse=True)

    def _promising(self, n: int) -> bool:
        """Whether a size without samples may be faster than the current one."""
        now = self._likely_speed(self.current)
        unknown = self.learned.ratio(n) is None
        return unknown and now > 0 and self._likely_speed(n) > MARGIN**2 * now

    def _decide(self, ready: Callable[[int], bool]) -> None:
        """Change the size, or plan a trial of another one."""
        learned, before = self.learned, self.current
        if self._plan and not self._hopeless(ready):
            return
        self._plan.clear()
        best = self._fastest(ready)
        if best != before:
            self.current, self._length = best, self._short
        if self._trying:
            self._wait = SOON if best != before else min(2 * self._wait, SELDOM)
            self._left, self._trying = self._wait, 0
        if not learned.affordable or self.dropped:
            return
        if (other := self._candidate(ready)) is not None:
            self._try(other)

    def _hopeless(self, ready: Callable[[int], bool]) -> bool:
        """Whether a trial only wastes time: its drafts are wrong."""
        drafts = max(self._trying, self.current)
        speed, enough = self.speed(drafts), self.recent[drafts].steps >= ENOUGH / 2
        return enough and speed is not None and speed < HOPELESS and ready(1)

    def _fastest(self, ready: Callable[[int], bool]) -> int:
        now, steps = self.speed(self.current), self.recent[self.current].steps
        if now is None:
            hopeless = (self.tokens(self.current) or 2) < LEAST_TOKENS and steps >= ENOUGH
            return 1 if hopeless and ready(1) else self.current
        if self.current > 1 and not steps:
            return self.current
        speeds = {n: self.speed(n) or 0.0 for n in self.learned.sizes if ready(n)}
        best = max(speeds, key=lambda n: speeds[n], default=self.current)
        # Drafts must win clearly; plain decoding is the choice in doubt.
        needed = 1.0 if best == 1 else MARGIN
        return best if speeds.get(best, 0.0) > needed * now else self.current

    def _candidate(self, ready: Callable[[int], bool]) -> int | None:
        """A size to try now."""
        learned = self.learned
        if self.current > 1 and learned.ratio(self.current) is None:
            return 1 if self._begun and ready(1) else None
        others = [n for n in self._others() if ready(n)]
        new = [n for n in others if self._promising(n)]
        if new and self._begun:
            return new[0]
        # In turn, since a ratio that was measured on a busy machine may be wrong.
        near = [
            n
            for n in others
            if self._likely_speed(n) >= NEAR * (self.speed(self.current) or 0)
        ]
        others = sorted(near or others[:1], key=lambda n: learned.by_size[n].trials)
        at_once = not self._begun and self.current == 1 and not learned.returns
        return others[0] if others and (self._left <= 0 or at_once) else None

    def _try(self, other: int) -> None:
        """Plan chunks of two sizes in turn; one more chunk lets the last of them be reported."""
        k = self._short
        now = Chunk(self.current, k)
        known = len(self.learned.by_size[max(other, self.current)].ratios) >= SAMPLES // 3
        if self.learned.returns or 1 not in (other, self.current):
            trial = Chunk(other, k, trial=True)
            self._plan.extend([trial, now] * (1 if known else 2) + [now])
        else:  # plain steps would leave the drafter's state behind: take them apart
            drafts = Chunk(max(other, self.current), k, trial=self.current == 1)
            plain = Chunk(1, max(CHUNK_STEPS[0], k // 2), apart=True)
            only_tokens = known and self.current == 1
            self._plan.extend(
                [drafts, drafts] if only_tokens else [drafts, plain, drafts, drafts]
            )
            self.current = drafts.size
        self.learned.by_size[other].trials += 1
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
