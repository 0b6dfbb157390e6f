"""Drafts under load, simulated: the choice of sizes against the best fixed one."""

import pytest
from cases import wide

from research import load


@pytest.mark.parametrize("name, rows", [("AVX-512", 2), *wide(("AVX2", 8))])
def test_the_ladder_loses_little_against_the_best_size_in_hindsight(name, rows):
    more, best = load.regret(rows, load.CURVES[name], 300)
    assert more < 0.03 and 1 < best < 64
