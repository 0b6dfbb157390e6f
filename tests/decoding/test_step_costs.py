"""Times of steps by size, from the times of chunks."""

import numpy as np
import pytest

from medusa_jax.decoding.step_costs import ENOUGH, FEW, StepCosts


def learned(costs, chunks, noise=0.0, seconds=(0.004, 0.006, 0.009)):
    """Costs after chunks of these steps, whose times vary by `noise`; first steps also wait for memory."""
    costs.add(np.ones(len(costs.ratio_N), int), 9.0)
    draws = np.random.default_rng(0).normal(1, noise, len(chunks))
    for steps_N, draw in zip(chunks, draws):
        costs.add(np.array(steps_N), draw * np.dot(steps_N, seconds))
    return costs


@pytest.mark.parametrize("guess", [[1.0, 1.0, 1.0], [1.0, 3.0, 9.0]])
@pytest.mark.parametrize(
    "noise, error, n", [(0.0, 0.01, 6), (0.05, 0.06, 20)], ids=["quiet", "loaded"]
)
def test_any_chunks_give_the_times_of_all_sizes(guess, noise, error, n):
    """One size alone in a chunk, or several together."""
    alone = [[8, 0, 0], [0, 8, 0], [0, 0, 8]]
    for chunks in (alone, [[20, 8, 4], [4, 20, 8], [8, 4, 20]]):
        costs = learned(StepCosts(guess), chunks * n, noise)
        np.testing.assert_allclose(costs.ratio_N, [1, 1.5, 2.25], rtol=error)


def test_a_machine_that_becomes_slower():
    """Only its rows cost more, as where memory was the limit before."""
    costs = learned(StepCosts([1.0, 1.0]), [[8, 0], [0, 8]] * 10, seconds=(0.005, 0.006))
    np.testing.assert_allclose(costs.ratio_N, [1, 1.2], rtol=0.01)
    costs = learned(costs, [[8, 0], [0, 32]] * 40, seconds=(0.005, 0.0085))
    np.testing.assert_allclose(costs.ratio_N, [1, 1.7], rtol=0.03)


def test_sizes_that_were_not_timed_keep_their_ratio_and_are_timed_again():
    costs = StepCosts([1.0, 1.4])
    sizes = []
    for _ in range(60):
        size = costs.to_time()
        sizes.append(size)
        steps_N = [0, 32] if size is None else np.eye(2, dtype=int)[size] * FEW
        costs.add(np.array(steps_N), np.dot(steps_N, (0.004, 0.0056)))
    np.testing.assert_allclose(costs.ratio_N, [1, 1.4], rtol=1e-3)
    assert sizes[:4] == [0, 0, 1, 1] and ENOUGH < FEW
    assert 4 <= sizes[4:].count(0) <= 8 and sizes[4:].count(1) == 0


def test_more_nodes_never_take_less_time():
    costs = learned(
        StepCosts([1.0] * 3), [[8, 0, 0], [0, 8, 0], [0, 0, 8]] * 9, seconds=(4, 6, 5)
    )
    np.testing.assert_allclose(costs.ratio_N, [1, 1.5, 1.5], rtol=0.02)
