"""Optimizers: schedules, what each rule touches, AdamW with 8-bit moments against its definition and AdamW."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from training_setup import tiny_config, training_arch

from medusa_jax.config import OptimConfig
from medusa_jax.model.llama import init_params
from medusa_jax.sharding import make_mesh, param_shardings, path_string
from medusa_jax.training import dry, step
from medusa_jax.training.optim import adamw8bit as adamw8bit_module
from medusa_jax.training.optim.adamw8bit import adamw8bit, magnitude
from medusa_jax.training.optim.optimizer import (
    make_rule,
    make_schedule,
    matrices,
    muon_matrices,
)
from medusa_jax.training.placement import compile_step
from medusa_jax.training.plan import RunPlan

pack, unpack = (
    jax.jit(f, static_argnames="signed")
    for f in (adamw8bit_module.pack, adamw8bit_module.unpack)
)
BOTH = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def definition(signed):
    """Dettmers et al. 2022, section 2.1, as a table in rising order."""
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = np.linspace(0.1, 1.0, parts + 1) * 10.0 ** (decade - 6)
        middle = (edges[1:] + edges[:-1]) / 2
        values += [*middle, *(-middle if signed else ())]
    assert len(values) == 256
    return np.sort(np.array(values))


@BOTH
def test_the_levels_are_the_papers(signed):
    codes = np.arange(256, dtype=np.uint8)[None, :]
    # Blocks of 256, all of scale 1.
    scale = {"scale": np.ones((1, 1), np.float32)}
    ours = np.asarray(unpack(codes, scale, signed))[0]
    np.testing.assert_allclose(ours, definition(signed), rtol=1e-6)
    assert float(jax.jit(magnitude, static_argnums=1)(np.int32(-1), signed)) == 0


@BOTH
@settings(deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 9))
def test_packing_is_the_nearest_level_of_the_block(signed, seed, spread):
    rng = np.random.default_rng(seed)
    x = 10.0 ** rng.uniform(-spread, 3, (16, 512))
    x = (x * (rng.choice([-1, 1], x.shape) if signed else 1)).astype(np.float32)
    # Levels and the points between them, where rounding could choose the wrong one.
    table = definition(signed)
    x[0, :256], x[0, 256:511] = table, (table[1:] + table[:-1]) / 2
    codes, scale = pack(jnp.asarray(x), signed)
    assert codes.dtype == jnp.uint8 and scale["scale"].shape == (16, 2)
    restored = np.asarray(unpack(codes, scale, signed)).reshape(16, 2, 256)
    blocks = x.reshape(16, 2, 256).astype(np.float64)
    largest = np.abs(blocks).max(-1, keepdims=True)
    unit = blocks / largest
    after = np.searchsorted(table, unit).clip(1, len(table) - 1)
    off = np.minimum(*(np.abs(unit - table[near]) for near in (after - 1, after)))
    if not signed:  # never down to zero
        smallest = (unit > 0) & (unit < table[1] / 2)
        off = np.where(smallest, np.abs(unit - table[1]), off)
    # Everything is scaled to values up to 1.
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(np.abs(restored / largest - unit), off, rtol=0, atol=4 * eps)


def test_updates_follow_adamw():
    """30 steps on noisy gradients: the direction agrees, and small leaves agree exactly."""
    params = {"w": jnp.ones((64, 128)), "v": jnp.ones((7,))}
    rules = [
        adamw8bit(lambda _: 0.01, 0.9, 0.99, 1e-8, 0.1, matrices),
        optax.adamw(0.01, 0.9, 0.99, 1e-8, weight_decay=0.1, mask=matrices),
    ]
    states = [rule.init(params) for rule in rules]
    steps = [jax.jit(rule.update) for rule in rules]
    for n in range(30):
        # Columns of very different size, as moments of real layers are.
        scale = 10.0 ** np.linspace(-3, 0, 128)[None, :]
        noise = np.random.default_rng(n).standard_normal((64, 128)) + 0.5
        grads = {"w": np.float32(noise * scale), "v": np.float32(noise[0, :7])}
        outs = [step(grads, state, params) for step, state in zip(steps, states)]
        states = [state for _, state in outs]
    ours, theirs = (jax.tree.map(np.asarray, u) for u, _ in outs)
    assert_close(ours["v"], theirs["v"])
    a, b = ours["w"].ravel(), theirs["w"].ravel()
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99
    assert 0.9 < np.linalg.norm(a) / np.linalg.norm(b) < 1.1


def test_its_state_is_a_quarter_and_lies_where_the_parameters_do():
    arch = training_arch(vocab_size=256, d_model=128, d_ff=256)
    params = jax.eval_shape(lambda k: init_params(arch, k), jax.random.key(0))
    sizes = {}
    kinds = ("adamw8bit", "float32"), ("adamw", "float32"), ("adamw", "bfloat16")
    for name, dtype in kinds:
        rule = make_rule(name, OptimConfig(moment_dtype=dtype), lambda _: 0.1)
        state = jax.eval_shape(rule.init, params)
        sizes[name, dtype] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        placed = param_shardings(make_mesh(), state)
        specs = {
            jax.tree_util.keystr(path): leaf.spec
            for path, leaf in jax.tree_util.tree_flatten_with_path(placed)[0]
        }
        moments = [s for path, s in specs.items() if ".mu[" in path and "up_proj" in path]
        assert moments == [P("fsdp", "tensor")], specs
    full = sizes["adamw", "float32"]
    # A quarter but for the smallest matrices, which stay in float32.
    assert sizes["adamw8bit", "float32"] < 0.3 * full
    assert sizes["adamw", "bfloat16"] == pytest.approx(0.75 * full, rel=0.01)


def step_temporaries(cfg):
    """Bytes of the compiled step in addition to state, parameters and batch."""
    shapes = dry.shapes_of(RunPlan(cfg, dry=True))
    return compile_step(*shapes).memory_analysis().temp_size_in_bytes


@pytest.mark.wide
def test_moments_are_unpacked_when_their_gradients_are_there(monkeypatch):
    """Not before the first microbatch, all at once: that is float32 moments' memory again."""
    # Microbatches whose logits are larger than everything the update needs.
    cfg = tiny_config("", stage="medusa1", batch_size=32, accumulation=2, loss_chunk=512)
    cfg.model.arch = training_arch(vocab_size=2048, d_model=128, max_position=512)
    cfg.heads.n_heads, cfg.optim.name, cfg.data.seq_len = 2, "adamw8bit", 512
    heads = 2 * 2048 * 128 * 4  # float32 bytes of the LM heads
    waits = step_temporaries(cfg)
    monkeypatch.setattr(step, "depend_on", lambda tree, done: tree)
    early = step_temporaries(cfg)
    assert early - waits > 0.5 * 2 * heads, (early, waits)


def test_parts_and_stacks_change_nothing(monkeypatch):
    """Large leaves in parts of their rows, like ones together: the update of each alone."""
    rng = np.random.default_rng(0)
    shapes = {"a": (256, 64), "b": (256, 64), "c": (8, 16, 64), "odd": (7, 4096)}
    grads = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    rule = adamw8bit_module.scale_by_adam8bit(0.9, 0.99, 1e-8)

    def updates(part):
        monkeypatch.setattr(adamw8bit_module, "PART", part)
        state = rule.init(grads)
        for _ in range(3):
            out, state = jax.jit(rule.update)(grads, state)
        return out, state

    whole, parts = updates(1 << 22), updates(1 << 13)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), whole, parts)
    alone = rule.init({"a": grads["a"]})
    for _ in range(3):
        out, alone = jax.jit(rule.update)({"a": grads["a"]}, alone)
    np.testing.assert_allclose(whole[0]["a"], out["a"], rtol=1e-6)


def test_moments_of_a_large_leaf_are_never_whole():
    x = jnp.zeros((8192, 4096))  # eight parts
    rule = adamw8bit_module.scale_by_adam8bit(0.9, 0.99, 1e-8)
    state = jax.eval_shape(rule.init, {"x": x})
    compiled = jax.jit(rule.update).lower({"x": x}, state).compile()
    # Besides what goes in and comes out a few parts, less than one moment in float32.
    assert compiled.memory_analysis().temp_size_in_bytes < 0.75 * x.nbytes


def rates(schedule, **fields):
    cfg = OptimConfig(lr=1.0, schedule=schedule, **fields)
    made = make_schedule(cfg, 100)
    return [float(made(i)) for i in range(101)]


def test_cosine_rises_to_the_peak_and_ends_at_zero():
    lr = rates("cosine", warmup_steps=10)
    np.testing.assert_allclose(lr[:11], [*np.arange(1, 11) / 10, 1], rtol=1e-6)
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
    is_mark = lambda x: x is None or hasattr(x, "reduction_axis")  # noqa: E731
    marks, _ = jax.tree_util.tree_flatten_with_path(muon_matrices(params), is_leaf=is_mark)
    chosen = [path_string(path) for path, mark in marks if mark is not None]
    layer = [f"self_attn/{p}" for p in "qkvo"] + ["mlp/gate", "mlp/up", "mlp/down"]
    assert sorted(chosen) == sorted(f"layers_0/{part}_proj/kernel" for part in layer)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon"])
def test_weight_decay_spares_vectors_only(name):
    """Without gradients a step of rate 0.1 takes 0.1 x 0.5 of every matrix, Muon's or not."""
    params = jax.tree.map(jnp.ones_like, init_params(training_arch(), jax.random.key(0)))
    rule = make_rule(name, OptimConfig(weight_decay=0.5), lambda _: 0.1)
    grads = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(rule.update)(grads, rule.init(params), params)
    for leaf in jax.tree.leaves(updates):
        np.testing.assert_allclose(leaf, -0.05 * (leaf.ndim >= 2), rtol=1e-6)
