"""Every registered drafter trains: all its weights, from its start, and in a dry run."""

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from tiny import random_params
from training_setup import packed_batch, stage_of, tiny_config, training_arch

from medusa_jax.heads.names import DRAFTERS
from medusa_jax.training import losses

NAMES = sorted(DRAFTERS)


def made(name, **train):
    cfg = tiny_config("", "medusa1", **train)
    cfg.heads = family.small_heads(name, n_heads=3)
    cfg.optim.name = "adamw"
    return cfg, stage_of(cfg)


@pytest.mark.parametrize("name", thinned(NAMES, "hydra"))
def test_every_weight_has_a_gradient_and_the_start_can_be_improved(name):
    _, stage = made(name, teacher_weight=1.0, label_weight=0.1, hidden_noise=1.0)
    backbone = random_params(training_arch(), 0)
    frozen = {"backbone": jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), backbone)}
    batch = packed_batch(np.random.default_rng(0), [(16,), (16,)], 16)
    counts = losses.pair_counts(batch, stage.offsets)
    key = jax.random.key(0)
    start = jax.jit(stage.init)(key, frozen)
    rng = np.random.default_rng(1)
    moved = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape), start)
    moved = jax.tree.map(lambda x: x.astype(jnp.float32), moved)

    @jax.jit
    def gradient(params):
        def loss(p):
            return stage.loss(p, frozen, losses.StepInputs(batch, counts, key))[0]

        return jax.value_and_grad(loss)(params)

    _, grads = gradient(moved)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 1e-8, path
    params, (first, grads) = start, gradient(start)
    for _ in range(25):
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
        last, grads = gradient(params)
    assert last < 0.97 * first
