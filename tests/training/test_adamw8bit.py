"""AdamW with 8-bit moments against AdamW: levels, updates, a loss curve, its size, resuming."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Var
from jax.sharding import PartitionSpec as P
from test_trainer import records, run
from training_setup import tiny_arch, tiny_config

from medusa_jax.config import OptimConfig
from medusa_jax.model.llama import init_params
from medusa_jax.sharding import make_mesh, param_shardings
from medusa_jax.training.adamw8bit import (
    SIGNED,
    UNSIGNED,
    adamw8bit,
    nothing,
    pack,
    search,
    unpack,
)
from medusa_jax.training.partition import make_rule, matrices

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_levels():
    for table in (SIGNED, UNSIGNED):
        assert table.shape == (256,) and (np.diff(table) > 0).all() and table[-1] == 1
        assert 0.0 in table
    np.testing.assert_allclose(
        SIGNED[SIGNED < 0], -SIGNED[(SIGNED > 0) & (SIGNED < 1)][::-1]
    )
    assert UNSIGNED[1] < 1e-6  # seven decades


def test_packing_is_the_nearest_level_of_the_block():
    x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    x *= 10.0 ** np.random.default_rng(1).integers(-3, 3, (64, 1)).astype(np.float32)
    codes, scale = pack(jnp.asarray(x), SIGNED)
    assert codes.dtype == jnp.uint8 and scale["scale"].shape == (64, 1)
    restored = np.asarray(unpack(codes, scale, SIGNED))
    for row in (0, 31):
        largest = np.abs(x[row]).max()
        for value, ours in zip(x[row], restored[row]):
            nearest = SIGNED[np.argmin(np.abs(SIGNED - value / largest))] * largest
            assert abs(ours - nearest) <= 1e-6 * largest
    assert np.linalg.norm(restored - x) / np.linalg.norm(x) < 0.02


def test_a_positive_second_moment_never_becomes_zero():
    x = jnp.full((64, 128), 1e-12).at[:, 0].set(1.0)
    codes, scale = pack(x, UNSIGNED)
    assert float(unpack(codes, scale, UNSIGNED).min()) > 0
    assert float(unpack(*pack(jnp.zeros((64, 128)), UNSIGNED), UNSIGNED).max()) == 0


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
        key = jax.random.key(n)
        # Columns of very different size, as moments of real layers are.
        scale = 10.0 ** jnp.linspace(-3, 0, 128)[None, :]
        noise = jax.random.normal(key, (64, 128)) + 0.5
        grads = {"w": noise * jnp.broadcast_to(scale, noise.shape), "v": noise[0, :7]}
        outs = [
            step(grads, state, params) for step, state in zip(steps, states, strict=True)
        ]
        states = [state for _, state in outs]
    ours, theirs = (u for u, _ in outs)
    np.testing.assert_allclose(ours["v"], theirs["v"], rtol=1e-5)
    a, b = ours["w"].ravel(), theirs["w"].ravel()
    assert float(a @ b / jnp.linalg.norm(a) / jnp.linalg.norm(b)) > 0.99
    assert 0.9 < float(jnp.linalg.norm(a) / jnp.linalg.norm(b)) < 1.1


def test_its_state_is_a_quarter_and_lies_where_the_parameters_do():
    arch = tiny_arch(vocab_size=256, d_model=128, d_ff=256)
    params = jax.eval_shape(lambda k: init_params(arch, k), jax.random.key(0))
    sizes = {}
    for name, dtype in (
        ("adamw8bit", "float32"),
        ("adamw", "float32"),
        ("adamw", "bfloat16"),
    ):
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


def curve(tokens, workdir, name, dtype="float32", steps=40):
    cfg = tiny_config(tokens, steps=steps, save_every=30)
    cfg.model.arch = tiny_arch(d_model=64, d_ff=64, head_dim=32)
    cfg.optim.name, cfg.optim.moment_dtype, cfg.optim.lr = name, dtype, 5e-3
    run(cfg, workdir)
    return [r["loss"][0] for r in records(workdir)]


def test_its_loss_curve_is_adamws(tokens, tmp_path):
    plain = curve(tokens, tmp_path / "plain", "adamw")
    assert plain[-1] < 0.8 * plain[0]
    for name, dtype, most in (("adamw8bit", "float32", 0.05), ("adamw", "bfloat16", 0.02)):
        other = curve(tokens, tmp_path / (name + dtype), name, dtype)
        assert other != plain
        np.testing.assert_allclose(other, plain, atol=most)


def test_packed_moments_resume_bit_for_bit(tokens, tmp_path):
    whole = curve(tokens, tmp_path / "whole", "adamw8bit", steps=12)
    cfg = tiny_config(tokens, steps=12, save_every=5)
    cfg.model.arch = tiny_arch(d_model=64, d_ff=64, head_dim=32)
    cfg.optim.name, cfg.optim.lr = "adamw8bit", 5e-3
    # The schedule is that of 12 steps; the run is cut off after step 7.
    from medusa_jax.training import trainer

    look = trainer.Run.look

    def cut(self, pending):
        if pending is not None and pending[0] == 7:
            raise KeyboardInterrupt
        return look(self, pending)

    trainer.Run.look = cut
    try:
        with pytest.raises(KeyboardInterrupt):
            run(cfg, tmp_path / "cut")
    finally:
        trainer.Run.look = look
    run(cfg, tmp_path / "cut")
    assert [r["loss"][0] for r in records(tmp_path / "cut")] == whole


@pytest.mark.parametrize("table", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_the_start_is_what_packing_zeros_gives(table):
    codes, scale = nothing((32, 512), table)
    expected, expected_scale = pack(jnp.zeros((32, 512)), table)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(scale["scale"], expected_scale["scale"])
    assert codes.dtype == expected.dtype


@pytest.mark.parametrize("table", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_search_is_searchsorted(table):
    """Ties included: an edge itself does not lie below."""
    edges = (table[1:] + table[:-1]) / 2
    x = np.concatenate([edges, np.nextafter(edges, 2), np.linspace(-1.2, 1.2, 999)])
    x = x.astype(np.float32)
    np.testing.assert_array_equal(search(edges, jnp.asarray(x)), np.searchsorted(edges, x))


def constant_lookups(jaxpr, depends):
    """Gathers whose positions do not depend on x: (their number, whether each output depends)."""
    known = dict(zip(jaxpr.invars, depends, strict=True))
    found = 0
    for eqn in jaxpr.eqns:
        read = [known.get(v, False) if isinstance(v, Var) else False for v in eqn.invars]
        outs = [any(read)] * len(eqn.outvars)
        if "jaxpr" in eqn.params:
            inside, outs = constant_lookups(eqn.params["jaxpr"].jaxpr, read)
            found += inside
        elif eqn.primitive.name == "gather":
            found += not read[1]
        known |= dict(zip(eqn.outvars, outs, strict=True))
    return found, [isinstance(v, Var) and known.get(v, False) for v in jaxpr.outvars]


def test_nothing_of_the_parameters_size_is_worked_out_at_compile_time():
    """XLA looks up constant positions while it compiles, however many there are."""
    edges = (SIGNED[1:] + SIGNED[:-1]) / 2

    def lookups(find):
        return constant_lookups(jax.make_jaxpr(find)(jnp.zeros((8,))).jaxpr, [True])[0]

    assert lookups(lambda x: search(edges, x)) == 0
    assert lookups(lambda x: x + jnp.take(jnp.asarray(edges), jnp.arange(8))) == 1
