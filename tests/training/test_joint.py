"""Backbone and heads trained together: equation 2, its strategies, adapters and their teacher, what comes out."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from test_trainer import host, pieces
from tiny import adapted_logits as logits
from tiny import write_tokenizer
from training_setup import (
    groups_of,
    records,
    run,
    setup_of,
    stage_of,
    tiny_config,
    training_arch,
)

from medusa_jax.config import HeadsConfig, OptimConfig
from medusa_jax.errors import UserError
from medusa_jax.files import hf
from medusa_jax.files.fingerprint import fingerprint
from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.files.layouts import heads_io
from medusa_jax.heads.hydra import HydraConfig
from medusa_jax.model import lora
from medusa_jax.model.llama import init_params
from medusa_jax.sharding import make_mesh
from medusa_jax.text import tokenizer_files
from medusa_jax.training.checkpoint import Checkpoints
from medusa_jax.training.models import more_layers
from medusa_jax.training.optim.optimizer import heads_weight, make_optimizer
from medusa_jax.training.partition import TABLE
from medusa_jax.training.placement import microbatches
from medusa_jax.training.plan import RunPlan
from medusa_jax.training.prepare import load
from medusa_jax.training.step import init_state


def test_lambda_0_rises_as_a_sine():
    weight = heads_weight("sine", 0.2, 100)
    at = [float(weight(jnp.int32(n))) for n in (0, 50, 100)]
    assert_close(np.array(at), np.array([0, 0.2 * np.sin(np.pi / 4), 0.2]), 4)
    assert float(heads_weight("constant", 0.2, 100)(jnp.int32(0))) == np.float32(0.2)


def test_groups_have_their_own_rate_and_rule():
    """Heads move four times as far as the backbone, alone as far; frozen groups have no optimizer state."""
    cfg = OptimConfig(lr=0.1, warmup_steps=0, schedule="constant", clip_norm=0.0)
    params = {"backbone": {"w": jnp.ones((3, 3))}, "heads": {"w": jnp.ones((3, 3))}}
    for name in ("adamw", "muon"):
        cfg.name, cfg.heads_name = name, "adamw"
        rule = make_optimizer(cfg, TABLE["medusa2"], 10)
        updates, _ = rule.update(params, rule.init(params), params)
        adamw = bool(np.allclose(updates["backbone"]["w"], -0.1, rtol=1e-5))
        assert adamw == (name == "adamw")  # Muon's first step is Nesterov's
        np.testing.assert_allclose(updates["heads"]["w"], -0.4, rtol=1e-5)
    cfg.name, cfg.heads_name, alone = "adamw", "muon", {"heads": params["heads"]}
    rule = make_optimizer(cfg, TABLE["medusa1"], 10)
    updates, (_, state) = rule.update(alone, rule.init(alone), alone)
    np.testing.assert_allclose(updates["heads"]["w"], -0.1, rtol=1e-5)
    assert list(state.inner_states) == ["heads"]


@pytest.fixture(scope="module")
def stage_1(tokens, model, tmp_path_factory):
    """A random backbone's directory and heads trained on it for 8 steps."""
    folder = tmp_path_factory.mktemp("stage1")
    cfg = tiny_config(tokens, "medusa1", steps=8, save_every=8)
    cfg.model.path = model
    run(cfg, folder)
    return model, folder / "export"


@pytest.mark.wide
def test_two_stages_and_an_export_bound_to_the_new_backbone(tokens, stage_1, tmp_path):
    model, heads = stage_1
    cfg = tiny_config(tokens, "medusa2", steps=6, lambda_0_schedule="sine")
    cfg.model.path, cfg.train.heads_path = str(model), str(heads)
    cfg.data.eval_source, cfg.data.eval_samples = tokens, 8
    run(cfg, tmp_path)
    mesh = make_mesh()
    log = records(tmp_path)
    first_heads = heads_io.load_heads(str(heads), cfg.model.arch, mesh)
    # Stage 2 starts where stage 1 ended: its first losses are those of the loaded heads.
    m1 = records(heads.parent)[-1]
    assert abs(log[0]["loss"][0] - m1["loss"][0]) < 0.15
    assert len(log[0]["loss"]) == 3 and np.isscalar(log[0]["lm_loss"])
    assert len(records(tmp_path, "eval")) == 1
    arch, trained = hf.load_backbone(str(tmp_path / "export"), mesh)
    print_of = fingerprint(arch, trained)
    folder = str(tmp_path / "export" / "heads")
    _, params, meta = heads_io.load_heads(folder, arch, mesh, fingerprint=print_of)
    assert meta["base"]["fingerprint"] == print_of
    recipe = meta["recipe"]
    assert recipe["config"]["train"]["stage"] == "medusa2"
    assert recipe["start"]["step"] == 8 and "start" not in recipe["start"]
    before = hf.load_backbone(str(model), mesh)[1]
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, trained)
    assert all(jax.tree.leaves(moved))
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), first_heads[1], params)
    assert all(jax.tree.leaves(moved))
    assert os.path.exists(tmp_path / "best" / "heads" / "heads.json")


def test_heads_that_do_not_belong_are_refused(tokens, stage_1, tmp_path):
    model, heads = stage_1
    cfg = tiny_config(tokens, "medusa2")
    cfg.train.heads_path = str(heads)
    with pytest.raises(UserError, match=r"model\.path"):
        run(cfg, tmp_path)
    cfg.model.path, cfg.heads = str(model), HeadsConfig(n_heads=2)
    with pytest.raises(UserError, match=r": n_heads is 3, not 2$"):
        run(cfg, tmp_path)
    cfg.heads = HydraConfig(n_heads=3)
    with pytest.raises(UserError, match=r": drafter is 'medusa', not 'hydra'$"):
        run(cfg, tmp_path)
    other = init_params(cfg.model.arch, jax.random.key(9))
    save_backbone(str(tmp_path / "other"), cfg.model.arch, other, "float32")
    cfg.model.path, cfg.heads = str(tmp_path / "other"), HeadsConfig(n_heads=3)
    with pytest.raises(UserError, match="fingerprint"):
        run(cfg, tmp_path)


def test_only_the_first_start_reads_the_first_heads(tokens, model):
    cfg = tiny_config(tokens, "medusa2")
    cfg.model.path, cfg.train.heads_path = model, "/nowhere"
    assert load(RunPlan(cfg), is_resumed=True)[0].start.keys() == {"backbone"}


def test_an_export_keeps_the_models_own_ends(tmp_path):
    """With the tokenizer elsewhere: EOS ids of both, and the model's generation settings."""
    for name in ("model", "elsewhere"):
        write_tokenizer(tmp_path / name)
    (tmp_path / "model" / "config.json").write_text('{"eos_token_id": 7}')
    theirs = tmp_path / "model" / "generation_config.json"
    theirs.write_text('{"eos_token_id": [7, 9], "no_repeat_ngram_size": 5}')
    other = tmp_path / "elsewhere" / "generation_config.json"
    other.write_text('{"no_repeat_ngram_size": 2}')
    out = tmp_path / "out"
    places = (str(tmp_path / name) for name in ("elsewhere", "model", "out"))
    ids = tokenizer_files.copy_tokenizer(*places)
    assert ids == {"bos_token_id": 1, "eos_token_id": [2, 7, 9]}
    assert (out / "generation_config.json").read_text() == theirs.read_text()
    assert (out / "tokenizer.json").exists() and not (out / "config.json").exists()


@pytest.mark.wide
def test_added_layers_change_nothing_until_they_have_learnt():
    arch, deeper = training_arch(), training_arch(n_layers=3)
    params = init_params(arch, jax.random.key(0))
    more = params | more_layers(deeper, 2, jax.random.key(1), make_mesh())
    assert set(more) - set(params) == {"layers_1", "layers_2"}

    plain = logits(arch, params)
    assert_close(logits(deeper, more), plain)
    # They do take part: with an output projection that is not zero the text changes, and the
    # zeros have a gradient.
    learnt = jax.tree.map(lambda x: x, more)
    mlp = learnt["layers_2"]["mlp"]["down_proj"]
    mlp["kernel"] = mlp["kernel"] + 0.1
    assert not np.allclose(logits(deeper, learnt), plain)
    moved = jax.jit(jax.grad(lambda p: jnp.sum(logits(deeper, p)[..., 3])))(more)
    for part, last in (("self_attn", "o_proj"), ("mlp", "down_proj")):
        assert np.any(moved["layers_1"][part][last]["kernel"])


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
        batch = rows.batch(range(8 * n, 8 * n + 8))
        state, metrics = step(state, frozen, microbatches(mesh, batch, 1))
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
    arch, merged = hf.load_backbone(str(tmp_path / "export"), mesh)
    adapted = logits(cfg.model.arch, setup.frozen["backbone"], adapters)
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
