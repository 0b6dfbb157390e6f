"""The chooser of trees, on a simulated machine: no request is much slower than plain decoding."""

import random
import statistics
from collections import deque

import pytest

from medusa_jax.decoding.chooser import Chooser, Learned, chain_accuracy, chain_tokens

LADDER = {1: 1.0, 3: 2.1, 8: 3.0, 12: 3.3}


class Machine:
    """Decodes texts with a chooser; the time of a plain step is 1, plus the load of other processes.

    Args:
      ratios: step time by size.
      accuracy: probability that a draft is right, by text.
      load: seconds of a step are multiplied by 1 to 1 + load, in bursts.
      unit: seconds of a plain step.
    """

    def __init__(self, ratios, learned, load=0.0, unit=0.015, seed=0):
        self.ratios, self.learned, self.load, self.unit = ratios, learned, load, unit
        self.random = random.Random(seed)
        self.busy = 1.0
        self.trace = []
        self.ready = set(ratios)

    def step_time(self, size):
        if self.random.random() < 0.05:
            self.busy = 1 + self.load * self.random.random()
        noise = 1 + 0.03 * self.random.random()
        return self.ratios[size] * self.busy * noise, self.ratios[size]

    def decode(self, accuracy, tokens=128, most=64):
        """Returns the speed-up over plain decoding without load, and steps by size."""
        chooser, spent, n, by_size = Chooser(self.learned), 0.0, 1, {}
        ahead = deque()
        while n < tokens:
            self.wanted = chooser.wanted()
            chunk = chooser.next(lambda size: size in self.ready, most)
            rounds = done = 0
            seconds = own = 0.0
            while rounds < chunk.steps and (chunk.apart or n + done < tokens):
                loaded, quiet = self.step_time(chunk.size)
                seconds, own, rounds = seconds + loaded, own + quiet, rounds + 1
                p = accuracy(n + done) if callable(accuracy) else accuracy
                length = 1
                while length < chunk.size and self.random.random() < p:
                    length += 1
                done += min(length, tokens - n - done)
            spent += own
            self.trace.append(
                (
                    chunk.size,
                    rounds,
                    chunk.apart,
                    done,
                    round(chooser.speed(3) or 0, 2),
                    round(self.learned.spent, 1),
                    round(chooser._left),
                )
            )
            if not chunk.apart:
                n += done
                by_size[chunk.size] = by_size.get(chunk.size, 0) + rounds
            ahead.append(
                (chunk, rounds, rounds, 0 if chunk.apart else done, seconds * self.unit)
            )
            if len(ahead) > 1:  # the host reads a chunk after it has dispatched the next
                chooser.report(*ahead.popleft())
        for last in ahead:
            chooser.report(*last)
        return (n - 1) / spent, by_size


def learned(sizes, start=3, expected=(), returns=True, note=None):
    ratios = {n: 1 + 0.1 * (n - 1) for n in sizes}
    return Learned(sizes, start, dict(expected), ratios, returns, note)


def speeds(ratios, accuracies, returns, load, texts=9, seeds=8):
    """Speed-ups of the first text of each of several processes, and sorted ones of all later texts."""
    first, later = [], []
    for seed in range(seeds):
        machine = Machine(ratios, learned(list(ratios), returns=returns), load, seed=seed)
        one, *more = [
            machine.decode(accuracies[i % len(accuracies)])[0] for i in range(texts)
        ]
        first.append(one)
        later += more
    return first, sorted(later)


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("load", [0.0, 2.0])
@pytest.mark.parametrize(
    "ratios, accuracy",
    [({1: 1.0, 3: 1.4, 6: 1.9, 11: 2.9}, 0.05), ({1: 1.0, 3: 1.25, 6: 1.5, 11: 2.2}, 0.15)],
)
def test_useless_drafts_cost_almost_nothing(ratios, accuracy, returns, load):
    first, later = speeds(ratios, [accuracy], returns, load)
    assert statistics.median(first) > 0.92
    assert statistics.median(later) > 0.97 and later[len(later) // 10] > 0.92


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("load", [0.0, 2.0])
def test_good_drafts_are_used(returns, load):
    """Of 3, 8 and 12 nodes, the second is fastest here; a short text begins with the first."""
    p, ratios = 0.75, {1: 1.0, 3: 1.1, 8: 1.35, 12: 2.2}
    best = max(chain_tokens(p, n) / r for n, r in ratios.items())
    _, later = speeds(ratios, [p], returns, load)
    assert statistics.median(later) > (0.75 if load else 0.86) * best


@pytest.mark.parametrize("returns", [True, False])
def test_texts_differ(returns):
    """Two texts of three have no use for drafts; the drafts of the third are used nevertheless."""
    _, later = speeds({1: 1.0, 3: 1.25, 8: 1.9}, [0.9, 0.05, 0.05], returns, 1.0, texts=19)
    n = len(later)
    assert statistics.mean(later[: 2 * n // 3]) > 0.93
    assert statistics.mean(later[2 * n // 3 :]) > 2


def test_a_text_that_begins_to_repeat():
    """Plain steps that keep the drafter's state can be left again."""
    ratios = {1: 1.0, 3: 1.3, 6: 1.8, 11: 2.6}
    machine = Machine(ratios, learned(list(ratios)))
    for _ in range(5):
        speed, by_size = machine.decode(lambda n: 0.95 if n > 300 else 0.02, 1500)
        assert speed > 1.5 and by_size[11] > 50


def test_a_size_that_is_not_compiled_is_wanted_and_not_used():
    ratios = {1: 1.0, 3: 1.1, 8: 1.2}
    machine = Machine(ratios, learned(list(ratios)))
    machine.ready = {3}
    _, by_size = machine.decode(0.1)
    assert set(by_size) == {3} and machine.wanted[0] == 1
    machine.ready = {1, 3}
    machine.decode(0.9, 128)
    assert 8 not in machine.wanted  # a process may end soon
    machine.decode(0.9, 2048)
    assert 8 in machine.wanted


def test_a_note_gives_the_next_process_its_start():
    first = learned([1, 3, 8], expected=LADDER.items())
    assert first.best() == 3 and first.note() == {}
    first.by_size[3].add(100, 50, 1)
    assert first.note() == {}  # tokens alone say nothing about this device
    first.by_size[3].ratios.extend([1.5, 1.6, 1.7])
    first.by_size[3].samples = 3
    assert learned([1, 3, 8], note=first.note()).best() == 3
    first.by_size[3].add(50, 50, 0)
    assert learned([1, 3, 8], note=first.note()).best() == 1


def test_a_chain_s_accuracy():
    assert chain_accuracy(chain_tokens(0.6, 5), 5) == pytest.approx(0.6, abs=1e-4)
    assert chain_accuracy(3.0, 3) == pytest.approx(1.0, abs=1e-4)
