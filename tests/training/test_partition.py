"""Schedules, what Muon and weight decay touch, updates that are undone."""

import jax
import numpy as np
from training_setup import training_arch

from medusa_jax.config import OptimConfig
from medusa_jax.model.llama import init_params
from medusa_jax.sharding import path_string
from medusa_jax.training.optim.optimizer import make_schedule, matrices, muon_matrices


def rates(schedule, **fields):
    cfg = OptimConfig(lr=1.0, schedule=schedule, **fields)
    made = make_schedule(cfg, 100)
    return [float(made(i)) for i in range(101)]


def test_cosine_rises_to_the_peak_and_ends_at_zero():
    lr = rates("cosine", warmup_steps=10)
    np.testing.assert_allclose(
        lr[:11], [0.1 * (i + 1) for i in range(10)] + [1.0], rtol=1e-6
    )
    np.testing.assert_allclose(lr[55], 0.5, rtol=1e-6)
    assert lr[100] < 1e-6 and all(np.diff(lr[10:]) <= 0)


def test_wsd_is_flat_and_then_linear():
    lr = rates("wsd", warmup_steps=0, final_lr_ratio=0.1)
    np.testing.assert_allclose(lr[:81], 1.0)
    np.testing.assert_allclose([lr[90], lr[100]], [0.55, 0.1], rtol=1e-5)


def test_more_warmup_than_steps_still_trains():
    assert float(make_schedule(OptimConfig(lr=1.0, warmup_steps=40), 4)(3)) == 1.0


def test_muon_takes_the_hidden_matrices_only():
    params = init_params(training_arch(), jax.random.key(0))
    marks = jax.tree_util.tree_flatten_with_path(
        muon_matrices(params), is_leaf=lambda x: x is None or hasattr(x, "reduction_axis")
    )[0]
    chosen = {
        path_string(path).split("/", 1)[-1] for path, mark in marks if mark is not None
    }
    assert chosen == {
        *(f"self_attn/{p}_proj/kernel" for p in "qkvo"),
        *(f"mlp/{p}_proj/kernel" for p in ("gate", "up", "down")),
    }


def test_weight_decay_spares_vectors():
    params = init_params(training_arch(), jax.random.key(0))
    assert matrices(params)["norm"]["scale"] is False
    assert matrices(params)["lm_head"]["kernel"] is True
