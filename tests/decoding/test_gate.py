"""The gate of drafts: which tree a step takes, on simulated texts."""

import jax.numpy as jnp
import numpy as np
import pytest

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.decoding.gate import PRIOR, RECENT, Gate, follows_free
from medusa_jax.heads.optional import CopiesText
from medusa_jax.heads.registry import make_drafter, whole_config
from medusa_jax.tree.tree import Tree

TREES = (Tree.none(), Tree.chain(2), Tree.chain(4))


def drafter_of(name):
    heads = HeadsConfig(drafter=name, lm_head="shared")
    return make_drafter(whole_config(heads), LlamaConfig())


def decode(drafter, right, ratios=(1.0, 1.3, 1.6), n=400, acceptance_rate=0.5):
    """Decodes n tokens where `right(position)` says whether a draft is right; the sizes and their time."""
    drafter = drafter_of(drafter)
    gate = Gate.before_text(TREES, drafter, 1, ratios, acceptance_rate)
    at, sizes = 0, []
    while at < n:
        size = int(gate.index_1[0])
        depth = TREES[size].depth
        found = next((d for d in range(depth) if not right(at + d)), depth)
        watched = size == 0 and isinstance(drafter, CopiesText)
        accepted_B = jnp.array([int(right(at)) if watched else found])
        at += found + 1
        one = jnp.ones(1, bool)
        known = accepted_B if size or watched else None
        gate = gate.after_step(size, known, one, jnp.array([at]))
        sizes.append(size)
    assert np.asarray(gate.steps_N).tolist() == [sizes.count(i) for i in range(3)]
    return sizes, sum(ratios[i] for i in sizes) / n, gate


def drawn(p, seed=0):
    chances = np.random.default_rng(seed).random(2000)
    return lambda at: chances[at] < p


@pytest.mark.parametrize("drafter", ["prompt_lookup", "medusa", "eagle"])
@pytest.mark.parametrize("p, most", [(0.0, 1.03), (0.1, 1.04), (0.6, 0.8), (1.0, 0.40)])
def test_drafts_pay_or_stop(drafter, p, most):
    """Time per token in plain steps, over one text that begins without knowledge."""
    times = [decode(drafter, drawn(p, seed))[1] for seed in range(3)]
    assert np.mean(times) <= most


@pytest.mark.parametrize("drafter, returns", [("prompt_lookup", True), ("medusa", True), ("eagle", False)])  # fmt: skip
def test_drafts_return_where_the_text_repeats(drafter, returns):
    """Unless plain steps have left the drafter's state behind: EAGLE has keys and values."""
    sizes, _, gate = decode(drafter, lambda at: at >= 150, n=500)
    assert 0 in sizes and (sizes[-1] == 2) == returns
    assert follows_free(drafter_of(drafter)) == returns
    assert (int(gate.followed_B[0]) >= 500) == returns


def test_earlier_texts_decide_how_a_text_begins():
    assert decode("medusa", drawn(0.9), acceptance_rate=0.9)[0][0] == 2
    assert decode("medusa", drawn(0.9), acceptance_rate=0.1)[0][0] == 0
    # A drafter that cannot return is tried at the beginning of every text.
    assert decode("eagle", drawn(0.9), acceptance_rate=0.1)[0][0] == 1


def test_only_running_rows_count():
    gate = Gate.before_text(TREES, drafter_of("medusa"), 2, (1.0, 1.3, 1.6), 0.5)
    new = gate.after_step(1, jnp.array([2, 0]), jnp.array([True, False]), jnp.array([3, 0]))
    kept = 0.5 ** (1 / RECENT) * PRIOR
    assert float(new.tested_1[0]) == pytest.approx(kept + 2)
    assert float(new.accepted_1[0]) == pytest.approx(kept / 2 + 2)
