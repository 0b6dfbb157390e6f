"""Heads trained by anybody's loop: the functions are the trainer's, for every kind of heads."""

import dataclasses
import os

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from closeness import assert_close
from test_losses import pairs_of
from tiny import random_params
from training_setup import (
    VOCAB,
    hidden_of,
    packed_batch,
    stage_of,
    tiny_config,
    training_arch,
)

from medusa_jax.errors import UserError
from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.files.layouts import native_heads
from medusa_jax.files.layouts.heads_io import open_heads
from medusa_jax.heads.levels import LevelDrafter
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.heads.registry import make_drafter
from medusa_jax.training.functions import HeadFunctions
from medusa_jax.training.losses.pairs import StepInputs, pair_counts

pytestmark = pytest.mark.usefixtures("x64")
ARCH = training_arch(n_layers=2)
IDS = np.arange(1, VOCAB, 3, dtype=np.int32)
B, T = 3, 20


def problem(name, **fields):
    """Configuration, functions, frozen variables and a batch of packed texts."""
    train = {"teacher_weight": 0.7, "label_weight": 0.3, "hidden_noise": 1.0}
    cfg = tiny_config("", "medusa1", dtype="float64", **train)
    cfg.model.arch = ARCH
    heads = {"lm_head": "own", "draft_vocab": len(IDS)} if name == "eagle3" else {}
    cfg.heads = family.small_heads(name, **{"n_heads": 3} | heads | fields)
    if isinstance(make_drafter(cfg.heads, ARCH), LevelDrafter):
        cfg.train.levels = 3
    frozen = {"backbone": jax.tree.map(jnp.asarray, random_params(ARCH, 0))}
    if cfg.heads.draft_vocab:
        frozen["draft_vocab"] = {"ids": jnp.asarray(IDS)}
    rng = np.random.default_rng(1)
    batch = packed_batch(rng, [(12, 8), (20,), (7, 11)], T, counted=0.8)
    return cfg, HeadFunctions(cfg.heads, ARCH, cfg.train), frozen, batch


@pytest.mark.wide
@pytest.mark.parametrize("name", thinned(sorted(DRAFTERS), "hydra"))
def test_the_loss_and_its_gradient_are_the_trainers(name):
    """The trainer runs the backbone by itself; the functions get its states and three entries of it."""
    cfg, functions, frozen, batch = problem(name)
    stage = stage_of(cfg, 1)
    params = functions.init(jax.random.key(0), frozen)
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape), params)
    hidden = hidden_of(cfg)(frozen, batch)
    assert hidden.shape == (B, T, ARCH.d_model * (1 + len(functions.taps)))
    counts = pair_counts(batch, stage.offsets)

    inputs = StepInputs(batch, counts)

    def theirs(params):
        return stage.loss({"heads": params}, frozen, inputs)[0]

    def ours(params):
        read = {n: frozen["backbone"][n] for n in ("embed_tokens", "norm", "lm_head")}
        given = frozen | {"backbone": read}
        rows = [batch[n] for n in ("tokens", "counted", "segment_ids", "positions")]
        return functions.loss(params, given, hidden, *rows)

    want, found = (jax.jit(jax.value_and_grad(f))(params) for f in (theirs, ours))
    assert_close(found, want, 512)
    # Its logits are those of its features.
    marks = batch["segment_ids"], batch["positions"]
    features = jax.jit(functions.features)(params, frozen, hidden, batch["tokens"], *marks)
    _, sums = jax.jit(stage.loss)({"heads": params}, frozen, inputs)
    ids = IDS if cfg.heads.draft_vocab else np.arange(VOCAB)
    for k in range(3):
        logp = jax.nn.log_softmax(functions.logits(params, frozen, k, features[k]))
        b, t = pairs_of(batch, k + 2)
        label = batch["tokens"][b, t + k + 2]
        b, t, label = (x[np.isin(label, ids)] for x in (b, t, label))
        place = np.searchsorted(ids, label)
        assert_close(sums.nll[k], -np.asarray(logp)[b, t, place].sum(), 512)


@pytest.mark.parametrize("name", thinned(sorted(DRAFTERS), "medusa"))
def test_every_weight_has_a_gradient_and_the_start_can_be_improved(name):
    cfg, functions, frozen, batch = problem(name)
    hidden, key = hidden_of(cfg)(frozen, batch), jax.random.key(0)
    rows = [batch[n] for n in ("tokens", "counted", "segment_ids", "positions")]

    @jax.jit
    def gradient(params):
        def loss(params):  # with noise
            return functions.loss(params, frozen, hidden, *rows, key)

        return jax.value_and_grad(loss)(params)

    params = functions.init(key, frozen)
    rng = np.random.default_rng(1)
    moved = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape), params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(moved)[1]):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 1e-8, path
    first, grads = gradient(params)
    for _ in range(25):
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
        last, grads = gradient(params)
    assert last < 0.97 * first


def test_heads_are_saved_for_their_backbone(tmp_path, monkeypatch):
    """And read back with their draft vocabulary; another shape is refused."""
    _, functions, frozen, _ = problem("eagle3")
    params = functions.init(jax.random.key(0), frozen)
    model, out = str(tmp_path / "model"), str(tmp_path / "heads")
    save_backbone(model, ARCH, frozen["backbone"], "float32")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="could not"):
        patch.setattr(native_heads, "DESCRIPTION", "too long" * 40)
        functions.save(out, params, frozen, model)
    assert os.listdir(tmp_path) == ["model"]
    functions.save(out, params, frozen, model)
    stored = open_heads(out)
    assert stored.heads == functions.heads
    np.testing.assert_array_equal(stored.ids, IDS)
    fc = stored.read(ARCH)["heads_0/fc/kernel"]
    np.testing.assert_array_equal(fc, params["heads_0"]["fc"]["kernel"])
    wider = dataclasses.replace(ARCH, n_layers=3)
    with pytest.raises(UserError, match=r": n_layers is 2, not 3$"):
        HeadFunctions(functions.heads, wider).save(out, params, frozen, model)
