"""Heads trained by anybody's loop: the functions are the trainer's, for every kind of heads."""

import dataclasses

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from closeness import assert_close
from tiny import random_params
from training_setup import VOCAB, stage_of, tiny_config, training_arch

from medusa_jax.errors import UserError
from medusa_jax.heads.registry import DRAFTERS, make_drafter
from medusa_jax.interop.heads_io import open_heads
from medusa_jax.interop.hf_writer import save_backbone
from medusa_jax.training import losses
from medusa_jax.training.functions import HeadFunctions

pytestmark = pytest.mark.usefixtures("x64")
ARCH = training_arch(n_layers=2)
IDS = np.arange(1, VOCAB, 3, dtype=np.int32)
B, T = 3, 20


def problem(name, **fields):
    """Configuration, functions, frozen variables and a batch of packed texts."""
    cfg = tiny_config("", "medusa1", teacher_weight=0.7, label_weight=0.3, dtype="float64")
    cfg.model.arch = ARCH
    heads = {"lm_head": "own", "draft_vocab": len(IDS)} if name == "eagle3" else {}
    cfg.heads = family.small_heads(name, **{"n_heads": 3} | heads | fields)
    if (
        make_drafter(cfg.heads, ARCH).stored_counts[0] == 1
    ):  # one set of layers for all levels
        cfg.train.levels = 3
    frozen = {"backbone": jax.tree.map(jnp.asarray, random_params(ARCH, 0))}
    if cfg.heads.draft_vocab:
        frozen["draft_vocab"] = {"ids": jnp.asarray(IDS)}
    rng = np.random.default_rng(1)
    lengths = np.array([[12, 8], [20, 0], [7, 11]])
    segments = np.zeros((B, T), np.int32)
    positions = np.zeros((B, T), np.int32)
    for b, (first, second) in enumerate(lengths):
        segments[b, :first], segments[b, first : first + second] = 1, 2
        positions[b, : first + second] = [*range(first), *range(second)]
    batch = {
        "tokens": rng.integers(0, VOCAB, (B, T)).astype(np.int32),
        "counted": rng.random((B, T)) < 0.8,
        "segment_ids": segments,
        "positions": positions,
    }
    return cfg, HeadFunctions(cfg.heads, ARCH, cfg.train), frozen, batch


def only_what_heads_read(frozen):
    names = ("embed_tokens", "norm", "lm_head")
    return frozen | {"backbone": {name: frozen["backbone"][name] for name in names}}


@pytest.mark.parametrize("name", thinned(sorted(DRAFTERS), "eagle3", "hydrapp"))
def test_the_loss_and_its_gradient_are_the_trainers(name):
    """The trainer runs the backbone by itself; the functions get its states and three entries of it."""
    cfg, functions, frozen, batch = problem(name)
    stage = stage_of(cfg, 1)
    params = functions.init(jax.random.key(0), frozen)
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape), params)
    hidden = jax.jit(stage.hidden)(frozen, batch)
    assert hidden.shape == (B, T, ARCH.d_model * (1 + len(functions.taps)))
    counts = losses.pair_counts(batch, stage.offsets)

    def theirs(params):
        inputs = losses.StepInputs(batch, counts)
        return stage.loss({"heads": params}, frozen, inputs)[0]

    def ours(params):
        given = only_what_heads_read(frozen)
        rows = [batch[n] for n in ("tokens", "counted", "segment_ids", "positions")]
        return functions.loss(params, given, hidden, *rows)

    want, found = (jax.jit(jax.value_and_grad(f))(params) for f in (theirs, ours))
    assert_close(found, want, 512)


@pytest.mark.parametrize("name", thinned(sorted(DRAFTERS), "eagle3"))
def test_the_loss_is_that_of_the_logits_of_the_features(name):
    """Of one text a row, by NumPy: labels and teacher over what the heads score."""
    cfg, functions, frozen, batch = problem(name)
    params = jax.jit(functions.init)(jax.random.key(0), frozen)
    hidden = jax.random.normal(
        jax.random.key(1), (B, T, ARCH.d_model * (1 + len(functions.taps))), jnp.float64
    )
    tokens, counted = batch["tokens"], batch["counted"]
    found = jax.jit(functions.loss)(params, frozen, hidden, tokens, counted)
    features = jax.jit(functions.features)(params, frozen, hidden, tokens)
    ids = IDS if cfg.heads.draft_vocab else np.arange(VOCAB)
    teacher = jax.nn.log_softmax(
        np.asarray(hidden)[..., : ARCH.d_model]
        @ frozen["backbone"]["lm_head"]["kernel"][:, ids]
    )
    teacher, want = np.asarray(teacher), 0.0
    for k in range(3):
        logits = np.asarray(functions.logits(params, frozen, k, features[k]))
        own = np.asarray(jax.nn.log_softmax(logits))
        total, count = 0.0, 0
        for b, t in np.ndindex(B, T - k - 2):
            if counted[b, t + 1 : t + k + 3].all():
                count += 1
                [place] = np.flatnonzero(ids == tokens[b, t + k + 2]) if (
                    tokens[b, t + k + 2] in ids
                ) else [None]  # fmt: skip
                if place is not None:
                    soft = -np.exp(teacher[b, t + k + 1]) @ own[b, t]
                    total += 0.3 * -own[b, t, place] + 0.7 * soft
        want += cfg.train.lambda_decay ** (k + 1) * total / count
    assert_close(found, np.float64(want), 512)


def test_heads_are_saved_for_their_backbone(tmp_path):
    """And read back with their draft vocabulary; another shape is refused."""
    _, functions, frozen, _ = problem("eagle3")
    params = functions.init(jax.random.key(0), frozen)
    save_backbone(str(tmp_path / "model"), ARCH, frozen["backbone"], "float32")
    out = str(tmp_path / "heads")
    functions.save(out, params, frozen, str(tmp_path / "model"))
    stored = open_heads(out)
    assert stored.heads == functions.heads
    np.testing.assert_array_equal(stored.ids, IDS)
    fc = stored.read(ARCH)["heads_0/fc/kernel"]
    np.testing.assert_array_equal(fc, params["heads_0"]["fc"]["kernel"])
    wider = dataclasses.replace(ARCH, n_layers=3)
    with pytest.raises(UserError, match="the heads are for"):
        HeadFunctions(functions.heads, wider).save(
            out, params, frozen, str(tmp_path / "model")
        )
