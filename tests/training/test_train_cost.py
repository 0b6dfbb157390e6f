"""The naive loss is the same loss; the command prints both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from test_functions import problem
from test_losses import heads_problem
from training_setup import write_config

from medusa_jax.heads.drafter import Backbone
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.llama import Llama
from medusa_jax.training import losses
from research import train_cost
from research.equation_1 import equation_1


def test_the_naive_loss_is_the_same_loss():
    _, backbone, drafter, params, batch = heads_problem()
    counts = losses.pair_counts(batch, (2, 3, 4))

    objective = losses.HeadObjective(drafter, 5, 0.8)

    def chunked(p):
        return losses.head_loss(p, backbone, objective, losses.StepInputs(batch, counts))[0]

    def naive(p):
        return equation_1(p, backbone, objective, batch)

    a, b = (jax.jit(jax.value_and_grad(f))(params) for f in (chunked, naive))
    assert_close(a, b)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["eagle", *wide("eagle3")])
def test_unrolled_levels_are_the_same_loss(name):
    """Over packed rows longer than a chunk, with the teacher's distribution."""
    cfg, functions, frozen, batch = problem(name, draft_vocab=0)
    drafter = make_drafter(cfg.heads, cfg.model.arch).loss_view(3)
    backbone = Backbone(
        Llama(cfg.model.arch, jnp.float64, taps=drafter.taps), frozen["backbone"]
    )
    targets = losses.HeadTargets(0.3, 0.7)
    objective = losses.HeadObjective(drafter, 5, 0.8, targets)
    batch = {name: np.concatenate([x] * 4, axis=1) for name, x in batch.items()}
    params = functions.init(jax.random.key(0), frozen)
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape), params)
    counts = losses.pair_counts(batch, (2, 3, 4))

    def chunked(p):
        return losses.head_loss(p, backbone, objective, losses.StepInputs(batch, counts))[0]

    def naive(p):
        return equation_1(p, backbone, objective, batch)

    a, b = (jax.jit(jax.value_and_grad(f))(params) for f in (chunked, naive))
    assert_close(a, b, 512)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["", "float32"])
def test_the_command_prints_both(tokens, tmp_path, capsys, kind):
    config = write_config(tmp_path, tokens, "medusa1")
    flags = [f"--config={config}", "--steps=2", f"--config.data.cache_features={kind}"]
    flags.append("--config.data.packing=first_fit")
    assert train_cost.main(flags) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [r[1].strip() for r in rows[2:]] == ["chunked", "naive"]
    assert all(float(r[2]) > 0 for r in rows[2:])
