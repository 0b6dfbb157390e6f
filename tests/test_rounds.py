"""Sizes timed in turn on a machine that others use: the choice, and whether it is to be trusted."""

import math

import numpy as np
import pytest

from medusa_jax.api import rounds
from medusa_jax.api.rounds import Race, best, is_sure

TOKENS = {2: 1.5, 3: 1.75, 4: 1.87, 6: 2.05, 8: 2.3, 10: 2.6, 12: 2.65, 16: 2.7, 24: 2.75}
COST = {1: 1.0} | {n: 1 + 0.03 * n for n in TOKENS}  # 10 nodes: 2.0 times plain decoding
RIGHT = 10


class Machine:
    """Steps take COST times what else runs; time passes as they do."""

    def __init__(self, slowness=lambda now, size: 1.0):
        self.now, self.slowness = 0.0, slowness

    def seconds(self, size):
        spent = 0.045 * COST[size] * self.slowness(self.now, size)
        self.now += spent
        return spent

    def race(self, earlier=()):
        race = Race(self.seconds, TOKENS, earlier)
        race.run()
        return race


def burst(begin, seconds):
    """Somebody takes a core: larger trees, which compute more, suffer more."""
    return lambda now, size: 1 + 0.1 * size if begin <= now < begin + seconds else 1.0


def test_a_quiet_machine():
    machine = Machine()
    race = machine.race()
    rows = race.rows()
    assert race.choice() == {"nodes": RIGHT, "rows": rows, "sure": True}
    assert [r["nodes"] for r in rows] == [2, 3, 4, 6, 8, 10, 12, 16]  # two behind the best
    for r in rows:
        assert r["step_latency_ratio"] == pytest.approx(COST[r["nodes"]], rel=1e-4)
        assert r["speedup"] == pytest.approx(
            TOKENS[r["nodes"]] / COST[r["nodes"]], rel=1e-4
        )
    assert machine.now < 6


@pytest.mark.parametrize("begin", np.linspace(0, 5, 21))
@pytest.mark.parametrize("seconds", [0.3, 1.0, 1.6])
def test_a_burst_changes_no_choice(begin, seconds):
    """Wherever it falls: on the first look at a size, or on up to half of the rounds."""
    assert best(Machine(burst(begin, seconds)).race().rows())["nodes"] == RIGHT


def test_noise_all_the_time_is_known_for_it_and_its_rounds_count_no_more_when_it_is_over():
    """A noisy start, then a quiet one: which rounds are which is told from their seconds."""
    rng = np.random.default_rng(0)
    wrong = sure = sure_after = 0
    for _ in range(30):
        race = Machine(lambda now, size: 1 + size * rng.exponential(0.1)).race()
        wrong += best(race.rows())["nodes"] != RIGHT
        sure += is_sure(race.rows())
        race = Machine(lambda now, size: 1 + 0.02 * rng.random()).race(race.rounds)
        assert best(race.rows())["nodes"] == RIGHT
        sure_after += is_sure(race.rows())
    assert wrong > 20 and sure < 2 and sure_after > 20, (wrong, sure, sure_after)


def test_a_machine_that_is_busy_without_end():
    """Steps that take twenty times as long: measuring ends, nothing that was hardly timed is taken,
    and the next start measures again."""
    rng = np.random.default_rng(0)
    machine = Machine(lambda now, size: 20 + 20 * rng.random())
    race = machine.race()
    longest = 40 * 0.045 * sum(COST.values())
    assert machine.now < rounds.PATIENT + longest
    assert race.choice()["nodes"] == 1 and not race.choice()["sure"]
    again = machine.race(race.rounds)
    assert len(again.rounds) > len(race.rounds)


def test_no_tree_is_taken_that_does_not_pay(monkeypatch):
    monkeypatch.setitem(
        globals(), "COST", {1: 1.0} | {n: 0.99 * t for n, t in TOKENS.items()}
    )
    race = Machine(burst(0.3, 0.5)).race()
    assert best(race.rows()) == rounds.PLAIN and is_sure(race.rows())


@pytest.mark.parametrize(
    ("other", "error", "sure"),
    [
        (1.9, 0.0, True),
        (1.95, 0.02, True),  # however it turns out, little is lost
        (1.9, 0.2, False),
        (1.0, 0.2, True),
    ],
)
def test_a_choice_is_sure_unless_another_may_be_much_faster(other, error, sure):
    rows = [
        {"nodes": 2, "speedup": other, "error": error},
        {"nodes": 4, "speedup": 2.0, "error": 0.01},
    ]
    assert best(rows)["nodes"] == 4 and is_sure(rows) == sure
    # One that may be slower than plain decoding is not sure, either.
    assert not is_sure([{"nodes": 4, "speedup": 1.1, "error": 0.2}])


def test_errors_are_those_of_the_median():
    """Ratios 1.0, 1.1, ..., 1.4 in the quiet half of the rounds, 3 in the others."""
    quiet = [{1: 1.0, 2: 1 + 0.1 * i} for i in range(5)]
    figures = rounds.row([*quiet, *({1: 9.0, 2: 27.0} for _ in range(5))], 2, 1.8)
    assert figures["step_latency_ratio"] == 1.2 and figures["speedup"] == 1.5
    assert figures["spread"] == pytest.approx(0.2 / 1.2, abs=1e-4)
    assert figures["error"] == pytest.approx(2 * 0.2 / 1.2 / math.sqrt(5), abs=1e-4)
