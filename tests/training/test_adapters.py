"""Adapters, teacher and quantised backbones in whole runs and in the compiled step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from test_trainer import host, pieces, run
from tiny import adapted_logits as logits
from training_setup import groups_of, setup_of, stage_of, tiny_config

from medusa_jax.interop import heads_io, hf
from medusa_jax.interop.fingerprint import fingerprint
from medusa_jax.model import lora
from medusa_jax.sharding import make_mesh
from medusa_jax.training.checkpoint import Checkpoints
from medusa_jax.training.optim.optimizer import make_optimizer
from medusa_jax.training.placement import microbatches
from medusa_jax.training.trainer import init_state


def config(tokens, stage="medusa2", **train):
    cfg = tiny_config(tokens, stage, **train)
    cfg.optim.name = "adamw"
    cfg.lora.rank = 4
    return cfg


def test_only_adapters_and_heads_move(tokens):
    """And the teacher, which is the same parameters with adapters off, stays bit for bit."""
    cfg = config(tokens, backbone_loss="kl")
    mesh, step, state, frozen, rows = pieces(cfg, tokens)
    before, start = host(frozen), host(state.params)
    teacher = np.asarray(logits(cfg.model.arch, frozen["backbone"]))
    assert set(start) == {"heads", "lora"}
    for n in range(3):
        state, metrics = step(state, frozen, microbatches(mesh, rows.batch(8 * n, 8), 1))
        if n == 0:
            # Fresh adapters are the teacher itself but for dropout, which B = 0 hides.
            assert abs(float(metrics["lm_objective"])) < 1e-6
            assert float(metrics["lm_loss"]) > 3
    assert float(metrics["lm_objective"]) > 1e-6
    jax.tree.map(np.testing.assert_array_equal, host(frozen), before)
    after = np.asarray(logits(cfg.model.arch, frozen["backbone"]))
    np.testing.assert_array_equal(after, teacher)
    # A's gradient is zero while B is, so A moves from the second step on.
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), start, host(state.params))
    assert all(jax.tree.leaves(moved))
    shapes = {x.shape for x in jax.tree.leaves((state.params["lora"], state.opt))}
    assert before["backbone"]["layers_0"]["mlp"]["up_proj"]["kernel"].shape not in shapes


@pytest.mark.wide
def test_a_merged_export_gives_the_adapters_logits(tokens, model, tmp_path):
    cfg = config(tokens, steps=6)
    cfg.model.path, cfg.optim.lr = model, 0.02
    run(cfg, tmp_path)
    mesh = make_mesh()

    setup = setup_of(cfg, mesh)
    optimizer = make_optimizer(cfg.optim, groups_of(cfg), 6)
    state = init_state(stage_of(cfg, 6), optimizer, mesh, setup.frozen, 0, setup.start)
    params, *_ = Checkpoints(str(tmp_path), 2).restore(state.params, state.opt)
    adapters = lora.scale(params["lora"], cfg.lora)
    adapted = logits(setup.arch, setup.frozen["backbone"], adapters)
    arch, merged = hf.load_backbone(str(tmp_path / "export"), mesh)
    assert_close(logits(arch, merged), adapted)
    assert float(jnp.max(jnp.abs(adapted - logits(arch, setup.frozen["backbone"])))) > 0.01
    heads = str(tmp_path / "export" / "heads")
    heads_io.load_heads(heads, arch, mesh, fingerprint=fingerprint(arch, merged))


@pytest.mark.wide
def test_heads_on_a_quantised_backbone_belong_to_the_original(tokens, model, tmp_path):
    cfg = config(tokens, "medusa1", steps=2)
    cfg.lora.rank, cfg.model.path, cfg.model.quantise = 0, model, "nf4"
    run(cfg, tmp_path)
    arch, original = hf.load_backbone(model, make_mesh())
    mark = fingerprint(arch, original)
    heads_io.load_heads(str(tmp_path / "export"), arch, make_mesh(), fingerprint=mark)
