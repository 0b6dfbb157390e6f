"""Times of steps by rows and nodes, from the times of chunks."""

from types import SimpleNamespace

import numpy as np
import pytest

from medusa_jax import Tree
from medusa_jax.decoding import chunk_clock
from medusa_jax.decoding.chunk_clock import FEW, ChunkClock
from medusa_jax.decoding.tree_size.costs import StepCosts
from medusa_jax.decoding.tree_size.gate import Gate
from medusa_jax.measured import DeviceCache

SIZES = [Tree.none(), Tree.chain(1), Tree.chain(3)]
NODES = [1, 2, 4]


def test_a_time_that_was_not_measured_is_within_its_neighbours_bounds():
    costs = StepCosts()
    assert costs.ratios(1, NODES).tolist() == [1, 1, 1]
    for rows, nodes, seconds in ((1, 1, 1.0), (1, 4, 1.5), (4, 1, 1.2)):
        costs.add(rows, nodes, 8 * seconds, 8)
    assert costs.estimate(1, 4) == costs.measured(1, 4) == 1.5
    # No less than with fewer nodes and than in proportion of more, no more than with more.
    assert costs.estimate(1, 2) == pytest.approx((1.0 * 1.5) ** 0.5)
    assert costs.estimate(4, 4) == pytest.approx((1.5 * 4.8) ** 0.5)
    for seconds in (9.0, 1.4, 8.0, 1.4):
        costs.add(1, 4, seconds)
    assert costs.measured(1, 4) == 1.4  # other work only adds time
    costs.add(1, 2, 2.0)
    assert costs.ratios(1, NODES).tolist() == [1, 2, 2]  # noise decided


def test_a_later_process_goes_on_with_the_times(monkeypatch, tmp_path):
    """Scaled to its pace, until it has timed a size itself; a short text need not time one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    note, seconds = DeviceCache("step_costs", "a model"), (0.004, 0.006, 0.009)
    costs = StepCosts(note)
    device = Device(monkeypatch, costs)
    for _ in range(40):
        device.chunk([32, 0, 0], seconds)
    costs.keep()
    later = StepCosts(note)
    np.testing.assert_allclose(later.ratios(1, NODES), [1, 1.5, 2.25], rtol=1e-6)
    device = Device(monkeypatch, later)
    slower = np.array(seconds) * 3
    assert [list(device.chunk([32, 0, 0], slower)) for _ in range(9)] == [[32, 0, 0]] * 9
    assert later.measured(1, 1) == pytest.approx(0.012)
    assert later.measured(1, 4) == pytest.approx(0.027)
    for _ in range(400):
        device.chunk([32, 0, 0], (0.004, 0.004, 0.02))
    np.testing.assert_allclose(later.ratios(1, NODES), [1, 1, 5], rtol=0.01)
    later.keep()
    np.testing.assert_allclose(StepCosts(note).ratios(1, NODES), [1, 1, 5], rtol=0.01)


@pytest.mark.parametrize("sizes", [[[1, 4, 0.1]], [[1, 4, "x", 2]], 3])
def test_a_note_of_another_version_is_ignored(sizes):
    class Note:
        def read(self):
            return {"sizes": sizes}

    assert StepCosts(Note()).ratios(1, NODES).tolist() == [1, 1, 1]


class Device:
    """Runs a stream's chunks: the gate's size, or, in a free chunk, the numbers of steps that a test gives."""

    def __init__(self, monkeypatch, costs):
        self.now, self.clock = 0.0, ChunkClock(costs, 1, SIZES)
        self.gate = Gate.before_text(SIZES, [1.0] * 3)
        self.sent = [self.gate, self.gate]
        monkeypatch.setattr(chunk_clock.time, "perf_counter", self.read)
        monkeypatch.setattr(chunk_clock, "WAITED", -1.0)

    def read(self):
        return self.now

    def chunk(self, free, seconds):
        """Returns the steps that were taken by size."""
        self.gate = self.clock.gate_of_next(self.gate)
        steps_N = np.array(free)
        if self.clock.steps:
            steps_N = self.clock.steps * np.eye(3, dtype=int)[self.gate.index_1[0]]
        self.gate = self.gate.replace(steps_N=self.gate.steps_N + steps_N)
        self.sent.append(self.gate)
        self.clock.see(type("Progress", (), {"gate": self.sent[-2]}))
        self.now += np.dot(steps_N, seconds)
        return steps_N


def test_only_chunks_whose_end_was_awaited_are_timed(monkeypatch):
    """Also the first one, though its prompt has long been read; and the one after a chunk that ended unseen."""
    costs, now = StepCosts(), [5.0]
    clock = ChunkClock(costs, 1, SIZES)
    monkeypatch.setattr(chunk_clock.time, "perf_counter", lambda: now[0])
    gate = Gate.before_text(SIZES, [1.0] * 3)

    class Taken:
        def __init__(self, steps_N, end):
            self.steps_N, self.end = steps_N, end

        def __array__(self, *_, **__):
            now[0] = max(now[0], self.end)
            return np.array(self.steps_N)

    def see(steps_N, end):
        clock.gate_of_next(gate)
        taken = gate.replace(steps_N=Taken(steps_N, end))
        clock.see(SimpleNamespace(gate=taken))

    see([0, 0, 0], 1.0)
    see([8, 0, 0], 5.8)
    assert costs.measured(1, 1) == pytest.approx(0.1)
    now[0] = 9.0
    see([8, 8, 0], 8.5)
    assert costs.measured(1, 2) is None
    see([8, 8, 8], 11.4)
    assert costs.measured(1, 4) == pytest.approx(0.3)


@pytest.mark.parametrize("free", [[0, 32, 0], [16, 8, 8]], ids=["one size", "mixed"])
def test_a_stream_times_all_sizes_again_and_again(monkeypatch, free):
    """At first at once, then seldom; after some time their times on a machine that became slower."""
    costs = StepCosts()
    device, seconds = Device(monkeypatch, costs), (0.004, 0.006, 0.009)
    first = [device.chunk(free, seconds) for _ in range(7)]
    assert {tuple(n) for n in first} >= {(FEW, 0, 0), (0, FEW, 0), (0, 0, FEW)}
    later = [device.chunk(free, seconds) for _ in range(300)]
    np.testing.assert_allclose(costs.ratios(1, NODES), [1, 1.5, 2.25], rtol=0.01)
    timed = sum(np.count_nonzero(n) == 1 and n.sum() == FEW for n in later)
    assert 6 < timed < 60
    for _ in range(1500):
        device.chunk(free, (0.006, 0.006, 0.018))
    np.testing.assert_allclose(costs.ratios(1, NODES), [1, 1, 3], rtol=0.01)
