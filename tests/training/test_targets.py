"""What a head is trained on, and that it cannot see it: for every registered drafter.

One packed row, written by hand. "u" is the user's, letters are an answer, "." ends it:

    position  0  1  2  3  4  5  6  7 | 8  9 10 11 | 12 13
    token     u  u  A  B  C  .  u  D | u  E  F  .  |  padding
    counted   -  -  x  x  x  x  -  x | -  x  x  x  |  -  -
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from closeness import assert_close
from tiny import random_heads
from training_setup import training_arch

from medusa_jax.config import HeadsConfig
from medusa_jax.heads import DRAFTERS, Backbone, make_drafter
from medusa_jax.heads.drafter import TextRows
from medusa_jax.heads.layers import shift_left
from medusa_jax.heads.medusa import Medusa
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


def row(tokens=TOKENS):
    arrays = {"tokens": tokens, "positions": POSITIONS, "segment_ids": SEGMENTS}
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


def teacher_forced(drafter, params, backbone):
    """batch -> logits [T, V] of every head, backbone included, as the loss computes them."""
    backbone = backbone.tapped(drafter.taps)

    @jax.jit
    def run(batch):
        rows = (batch["tokens"], batch["positions"], batch["segment_ids"])
        features = drafter.features(
            params, backbone, TextRows(backbone.forward(*rows), *rows)
        )
        heads = range(drafter.n_heads)
        return [drafter.head_logits(params, backbone, k, features[k])[0] for k in heads]

    return run


@pytest.mark.parametrize("name", thinned(sorted(DRAFTERS), "hydrapp"))
def test_the_loss_is_over_the_hand_written_pairs(name, backbone):
    drafter, params = registered(name, backbone)
    backbone = backbone.tapped(drafter.taps)
    counts = losses.pair_counts(row(), (2, 3, 4))
    assert counts.tolist() == [len(PAIRS[k]) for k in (1, 2, 3)]
    total, sums = jax.jit(
        lambda p: losses.head_loss(
            p,
            backbone,
            losses.HeadObjective(drafter, 5, 0.8),
            losses.StepInputs(row(), counts),
        )
    )(params)
    logits = teacher_forced(drafter, params, backbone)(row())
    expected = 0.0
    for k in (1, 2, 3):
        logp = jax.nn.log_softmax(logits[k - 1])
        nll = -sum(float(logp[t, label]) for t, label in PAIRS[k])
        right = sum(int(logits[k - 1][t].argmax()) == label for t, label in PAIRS[k])
        assert_close(sums.loss[k - 1], nll)
        assert int(sums.top1[k - 1]) == right
        expected += 0.8**k * nll / len(PAIRS[k])
    assert_close(total, expected)


def check_no_head_reads_the_future(drafter, params, backbone):
    """Changing the label, or anything after it, must not move the logits that guess it."""
    run = teacher_forced(drafter, params, backbone)
    before, t = run(row()), 1
    for k in range(drafter.n_heads):
        label = t + k + 2
        tokens = [x if i < label else (x + 13) % 64 for i, x in enumerate(TOKENS)]
        after = run(row(tokens))
        assert_close(after[k][: t + 1], before[k][: t + 1])
        moved = np.abs(after[k][label] - before[k][label]).max()
        assert moved > 1e-3 * np.abs(before[k][label]).max()
    # Nor may the second text see the first: it is another conversation.
    tokens = [(x + 13) % 64 if i < 8 else x for i, x in enumerate(TOKENS)]
    for k, (new, old) in enumerate(zip(run(row(tokens)), before)):
        last = 12 - (k + 2)  # further on, the tokens that lead up to the label are missing
        assert_close(new[8:last], old[8:last])


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_no_head_reads_the_future(name, backbone):
    check_no_head_reads_the_future(*registered(name, backbone), backbone)


@dataclasses.dataclass(frozen=True)
class ReadsItsLabel(Medusa):
    """Medusa with a mistake: head k's features hold a trace of the token it has to guess."""

    name = ""

    def features(self, params, backbone, rows):
        features = super().features(params, backbone, rows)
        labels = [shift_left(rows.tokens_BT, k + 2) for k in range(self.n_heads)]
        return features + 0.01 * jnp.stack([backbone.embed(label) for label in labels])


@dataclasses.dataclass(frozen=True)
class ReadsTheNextState(Medusa):
    """Medusa with another mistake: the hidden state of the position after."""

    name = ""

    def features(self, params, backbone, rows):
        hidden_BTD = rows.hidden_BTE + 0.1 * jnp.roll(rows.hidden_BTE, -K - 1, axis=1)
        return super().features(params, backbone, rows._replace(hidden_BTE=hidden_BTD))


@dataclasses.dataclass(frozen=True)
class ReadsTheNeighbour(Medusa):
    """And a third: the hidden state before it, be it of another text."""

    name = ""

    def features(self, params, backbone, rows):
        hidden_BTD = rows.hidden_BTE + 0.1 * jnp.roll(rows.hidden_BTE, 1, axis=1)
        return super().features(params, backbone, rows._replace(hidden_BTE=hidden_BTD))


@pytest.mark.parametrize("kind", [ReadsItsLabel, ReadsTheNextState, ReadsTheNeighbour])
def test_the_check_finds_a_head_that_cheats(kind, backbone):
    drafter = kind(HeadsConfig(n_heads=K, lm_head="shared"), backbone.llama.config)
    with pytest.raises(AssertionError):
        check_no_head_reads_the_future(drafter, trained(drafter, backbone), backbone)
