"""What a head is trained on, for every registered drafter (what it may read: heads/test_contract.py).

One packed row, written by hand. "u" is the user's, letters are an answer, "." ends it:

    position  0  1  2  3  4  5  6  7 | 8  9 10 11 | 12 13
    token     u  u  A  B  C  .  u  D | u  E  F  .  |  padding
    counted   -  -  x  x  x  x  -  x | -  x  x  x  |  -  -
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from closeness import assert_close
from tiny import random_heads
from training_setup import training_arch

from medusa_jax.config import HeadsConfig
from medusa_jax.heads.drafter import Backbone, TextRows
from medusa_jax.heads.registry import DRAFTERS, make_drafter
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.training import losses

K = 3
TOKENS = [40, 41, 2, 3, 4, 1, 42, 5, 43, 6, 7, 1, 0, 0]
COUNTED = [0, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0]
SEGMENTS = [1] * 8 + [2] * 4 + [0, 0]
POSITIONS = [*range(8), *range(4), 0, 0]
# (t, label) of every pair that counts: head k (1-based) at t guesses the token at t + k + 1, and
# the tokens between have to be the answer's too. D, after the user's 42, is no head's target;
# neither is anything that starts in the first segment and ends in the second.
PAIRS = {
    1: [(1, 3), (2, 4), (3, 1), (8, 7), (9, 1)],
    2: [(1, 4), (2, 1), (8, 1)],
    3: [(1, 1)],
}


def row():
    arrays = {"tokens": TOKENS, "positions": POSITIONS, "segment_ids": SEGMENTS}
    batch = {name: jnp.asarray([x], jnp.int32) for name, x in arrays.items()}
    return batch | {"counted": jnp.asarray([COUNTED], bool)}


@pytest.fixture(scope="module")
def backbone():
    arch = training_arch(n_layers=2)
    params = init_params(arch, jax.random.key(1))
    return Backbone(Llama(arch), jax.tree.map(lambda x: 2 * x, params))


def trained(kind, backbone):
    """Parameters that have left their start: nothing is zero, everything matters."""
    return jax.tree.map(np.float32, random_heads(kind, backbone, seed=0))


def registered(name, backbone):
    heads = HeadsConfig(drafter=name, n_heads=K, n_layers=2, lm_head="low_rank", rank=8)
    drafter = make_drafter(heads, backbone.llama.config)
    return drafter, trained(drafter, backbone)


@pytest.mark.parametrize("name", thinned(sorted(DRAFTERS), "hydrapp"))
def test_the_loss_is_over_the_hand_written_pairs(name, backbone):
    drafter, params = registered(name, backbone)
    backbone = backbone.tapped(drafter.taps)
    counts = losses.pair_counts(row(), (2, 3, 4))
    assert counts.tolist() == [len(PAIRS[k]) for k in (1, 2, 3)]
    objective = losses.HeadObjective(drafter, 5, 0.8)
    inputs = losses.StepInputs(row(), counts)
    loss = jax.jit(lambda p: losses.head_loss(p, backbone, objective, inputs))
    total, sums = loss(params)

    @jax.jit
    def logits_of(params):
        rows = losses.rows(row())
        features = drafter.features(
            params, backbone, TextRows(backbone.forward(*rows), *rows)
        )
        return [drafter.head_logits(params, backbone, k, features[k])[0] for k in range(K)]

    logits = logits_of(params)
    expected = 0.0
    for k in (1, 2, 3):
        logp = jax.nn.log_softmax(logits[k - 1])
        nll = -sum(float(logp[t, label]) for t, label in PAIRS[k])
        right = sum(int(logits[k - 1][t].argmax()) == label for t, label in PAIRS[k])
        assert_close(sums.loss[k - 1], nll)
        assert int(sums.top1[k - 1]) == right
        expected += 0.8**k * nll / len(PAIRS[k])
    assert_close(total, expected)
