"""Drafts under load, simulated: the choice of sizes against the best fixed one, and a budget that rows share."""

import numpy as np
import pytest
from cases import wide

from research import load


@pytest.mark.parametrize("name, rows", [("AVX-512", 2), *wide(("AVX2", 8))])
def test_the_ladder_loses_little_against_the_best_size_in_hindsight(name, rows):
    more, best = load.regret(rows, load.CURVES[name], 300)
    assert more < 0.03 and 1 < best < 64


def test_a_shared_budget_gains_little():
    """Nothing for one row, and for more rows less than the 8% that it would have to."""
    for cost in load.CURVES.values():
        gain_R = [
            load.shared_gain(rows, cost, 20, np.random.default_rng(0))
            for rows in (1, 4, 32)
        ]
        assert abs(gain_R[0]) < 0.01 and 0 <= max(gain_R[1:]) < 0.08
