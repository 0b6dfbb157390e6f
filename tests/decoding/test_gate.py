"""The gate of drafts: which size of the tree a step takes, on simulated texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from medusa_jax.decoding.tree_size.gate import PAUSES, TRIAL, Gate
from medusa_jax.decoding.tree_size.rates import rate_of
from medusa_jax.tree.tree import Tree

DEPTHS = (0, 2, 7)
SIZES = tuple(Tree.chain(depth) for depth in DEPTHS)
# Tokens per step of SmolLM2's Hydra++ with 1, 3 and 8 nodes.
EVIDENCE = (1.0, 2.094, 3.0252)
# Time of a step: a fast accelerator, float32 and 4-bit weights on CPUs, and slower ones.
COSTS = [(1, 1.02, 1.05), (1, 1.12, 1.33), (1, 1.36, 1.9), (1, 1.6, 2.6), (1, 2.0, 3.2)]
LENGTH, TEXTS = 2000, 16


def one_text(gate, accepted_NT):
    """Decode a text whose step with size n at position t accepts accepted[n, t] drafts; the gate and the time."""
    depth_N, ratio_N = jnp.array(DEPTHS), gate.ratio_N

    def one(carry):
        gate, at, seconds = carry
        index = gate.index_1[0]
        accepted = accepted_NT[index, at]
        new = gate.after_step(accepted[None], depth_N[index], jnp.ones(1, bool))
        return new, at + accepted + 1, seconds + ratio_N[index]

    gate, _, seconds = lax.while_loop(lambda carry: carry[1] < LENGTH, one, (gate, 0, 0.0))
    return gate, seconds


decode = jax.jit(jax.vmap(one_text, (None, 0)))
after_step = jax.jit(Gate.after_step)


def texts(*rates, change=None):
    """Texts whose drafts of level l are right with probability rates[l - 1], the last one for deeper levels.

    Args:
      change: rates of the second half.
    """
    chance_BTL = np.random.default_rng(0).random((TEXTS, LENGTH + 10, max(DEPTHS)))
    rate_TL = np.empty(chance_BTL.shape[1:])
    rate_TL[:] = (*rates, *rates[-1:] * (max(DEPTHS) - len(rates)))
    if change is not None:
        rate_TL[LENGTH // 2 :] = change
    right_BT = np.cumprod(chance_BTL < rate_TL, axis=-1).sum(-1)
    return np.stack([np.minimum(right_BT, depth) for depth in DEPTHS], axis=1)


def regrets(accepted_BNT, costs, evidence):
    """Time of each text over that of its best fixed size, and the share of steps with each size."""
    gate = Gate.before_text(SIZES, costs, evidence)
    ended, seconds_B = decode(gate, accepted_BNT)
    fixed_NB = [
        cost * decode(gate.always(n), accepted_BNT)[1] for n, cost in enumerate(costs)
    ]
    steps_BN = np.asarray(ended.steps_N)
    return seconds_B / np.min(fixed_NB, axis=0) - 1, steps_BN / steps_BN.sum(1)[:, None]


@pytest.mark.parametrize("evidence", [EVIDENCE, None], ids=["file", "no file"])
@pytest.mark.parametrize(
    "rates",
    [
        (0.0,),
        (0.1,),
        (0.3,),
        (0.5,),
        (0.7,),
        (0.9,),
        (1.0,),
        (0.5, 0.4, 0.3),
        (0.67, 0.63, 0.7),
    ],
    ids=str,
)
def test_long_texts_take_at_most_3_percent_longer_than_with_the_best_size(rates, evidence):
    accepted_BNT = texts(*rates)
    for costs in COSTS:
        regret_B, _ = regrets(accepted_BNT, costs, evidence)
        assert regret_B.mean() < 0.03, (costs, regret_B)


@pytest.mark.parametrize("before, after", [(0.1, 0.8), (0.8, 0.1)])
def test_a_change_in_the_middle_is_followed(before, after):
    """No fixed size is best in both halves."""
    accepted_BNT = texts(before, change=after)
    for costs in COSTS[1:3]:
        regret_B, share_BN = regrets(accepted_BNT, costs, EVIDENCE)
        assert regret_B.mean() < -0.05 and (share_BN[:, 2] > 0.1).all()


@pytest.mark.parametrize("evidence", [EVIDENCE, None], ids=["file", "no file"])
def test_copied_drafts_right_in_bursts(evidence):
    """One level-1 draft in five is right, and then nearly all: near the break-even point the gate may stop too early."""
    for costs, most in zip(COSTS, (0.03, 0.03, 0.1, 0.03, 0.03)):
        assert regrets(texts(0.2, 0.97), costs, evidence)[0].mean() < most


def test_the_evidence_decides_how_a_text_begins():
    def first(costs, evidence):
        return int(Gate.before_text(SIZES, costs, evidence).index_1[0])

    # With the last costs drafts are 4.7% faster: less than the error of a measured cost.
    assert [first(costs, EVIDENCE) for costs in COSTS] == [2, 2, 2, 1, 0]
    assert [first(costs, None) for costs in COSTS] == [2, 1, 1, 1, 0]
    assert first((1, 3, 9), EVIDENCE) == 0


def test_tokens_are_the_evidence_then_the_texts_own():
    assert sum(rate_of(3.0252, 7) ** level for level in range(8)) == pytest.approx(3.0252)
    gate = Gate.before_text(SIZES, COSTS[1], EVIDENCE)
    np.testing.assert_allclose(gate.tokens(), EVIDENCE, rtol=1e-4)
    # Level 1 is right in a quarter of the steps, level 2 always then.
    for step in range(400):
        accepted = 2 if step % 4 == 0 else 0
        gate = gate.replace(index_1=np.array([1], np.int32))
        gate = after_step(gate, jnp.array([accepted]), 2, jnp.ones(1, bool))
    np.testing.assert_allclose(gate.tokens()[:2], [1, 1.5], rtol=0.05)
    assert gate.tokens()[2] > 2.2  # the levels below follow the second


def test_drafts_are_tried_again_after_a_pause():
    gate = Gate.before_text(SIZES, COSTS[2], EVIDENCE)
    nothing, indices = jnp.zeros(1, jnp.int32), []
    for _ in range(1500):
        indices.append(int(gate.index_1[0]))
        gate = after_step(gate, nothing, DEPTHS[indices[-1]], jnp.ones(1, bool))
    drafted = np.array(indices) > 0
    begins = np.flatnonzero(drafted[1:] & ~drafted[:-1]) + 1
    assert len(begins) >= 4 and drafted.mean() < 0.1
    for begin in begins[:-1]:
        assert drafted[begin : begin + TRIAL].all()
    pauses = np.diff(begins)
    assert PAUSES[0] < pauses.min() and pauses.max() < PAUSES[1] + 32


def test_plain_steps_that_test_a_draft_need_no_trial():
    """As for prompt lookup."""
    gate = Gate.before_text(SIZES, (1, 3, 9), EVIDENCE).replace(
        ratio_N=jnp.array([1, 1.1, 1.3])
    )
    ones = jnp.ones(1, jnp.int32)
    for _ in range(3):
        gate = after_step(gate, ones, 1, jnp.ones(1, bool))
    assert int(gate.index_1[0]) > 0


def test_only_running_rows_count():
    gate = Gate.before_text(SIZES, COSTS[0]).replace(index_1=jnp.array([1]))
    running_B = jnp.array([True, False])
    new = gate.after_step(jnp.array([2, 0]), 2, running_B)
    one = gate.after_step(jnp.array([2]), 2, jnp.ones(1, bool))
    jax.tree.map(np.testing.assert_allclose, new, one)
    both = gate.after_step(jnp.array([2, 0]), 2, jnp.ones(2, bool))
    assert float(both.tested_L[0]) == pytest.approx(float(one.tested_L[0]) + 1)
