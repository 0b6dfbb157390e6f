"""float32 means float32: no product leaves its precision to the device's default.

GPUs multiply float32 in TF32, TPUs in bfloat16, unless a product asks for `Precision.HIGHEST`.
The programs are traced, none is compiled.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_setup
from cases import wide
from tiny import tiny_arch

from medusa_jax.config import HeadsConfig, LoraConfig
from medusa_jax.heads.drafter import Backbone, Committed, DraftRequest, Ranked, TextRows
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.model.cache import KVCache
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.model.placing import decoder, prepare
from medusa_jax.model.quantise import quantise_backbone
from medusa_jax.model.stored import Storage, store
from medusa_jax.sharding import make_mesh
from medusa_jax.training import losses
from medusa_jax.tree.tree import Tree

B, T, SLOTS = 2, 6, 16
HIGHEST = (jax.lax.Precision.HIGHEST,) * 2
NAMES = sorted(DRAFTERS)


def products(jaxpr):
    """Every float32 product of a program: (where it is written, its precision)."""
    for equation in jaxpr.eqns:
        is_product = equation.primitive.name == "dot_general"
        if is_product and equation.invars[0].aval.dtype == jnp.float32:
            yield equation.source_info.traceback, equation.params["precision"]
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner)


def check(fn, *args):
    """All products of `fn(*args)` are exact ones, and there are some."""
    found = list(products(jax.make_jaxpr(fn)(*args).jaxpr))
    assert found
    for where, precision in found:
        assert precision == HIGHEST, f"{precision}\n{where}"


def zeros(fn, *args):
    """What `fn(*args)` gives, in numpy zeros: it is not run, nor compiled."""
    shapes = jax.eval_shape(fn, *args)
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


def backbone_of(config):
    key = jax.eval_shape(lambda: jax.random.key(0))
    return zeros(partial(init_params, config), key)


def rows_of(config, taps=()):
    ints = jnp.zeros((B, T), jnp.int32)
    return jnp.zeros((B, T, config.d_model * (1 + len(taps)))), ints, ints, ints + 1


@pytest.mark.parametrize("form", ["stored", "fused", "coded", "int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_backbone(form, tied):
    config = tiny_arch(d_model=64, tie_embeddings=tied)
    params, llama = backbone_of(config), Llama(config)
    if form in ("fused", "coded"):
        llama = decoder(config, jnp.float32, make_mesh(), Storage())
        params = zeros(lambda p: prepare(p, config, jnp.float32), params)
    if form == "coded":
        params = zeros(lambda p: store(p, Storage(weights="int8")), params)
    if form == "int8":
        params = zeros(lambda p: quantise_backbone(p, "int8"), params)
    _, tokens, positions, segments = rows_of(config)
    cache = KVCache.zeros(2, B, SLOTS, config.n_kv_heads, config.head_dim, jnp.float32)
    start_B, triangle = jnp.zeros((B,), jnp.int32), jnp.tri(T, dtype=bool)

    def run(params):
        backbone = Backbone(llama, params)
        hidden, _ = backbone.decode(tokens, positions, cache, start_B, triangle)
        one, _ = backbone.decode(
            tokens[:1, :1],
            positions[:1, :1],
            jax.tree.map(lambda x: x[:1], cache),
            start_B[:1],
            triangle[:1, :1],
        )
        if form in ("stored", "int8"):
            hidden += backbone.forward(tokens, positions, segments)
        return backbone.lm_head(hidden), one

    check(run, params)


@pytest.mark.parametrize("weights", ["", "int8"])
@pytest.mark.parametrize("lm_head", [*wide("shared", "own"), "low_rank"])
@pytest.mark.parametrize("name", NAMES)
def test_every_drafter(name, lm_head, weights):
    config = tiny_arch(d_model=64, vocab_size=64)
    backbone = Backbone(Llama(config), backbone_of(config))
    sizes = {"drafter": name, "n_heads": 3, "lm_head": lm_head, "rank": 64}
    drafter = make_drafter(
        dataclasses.replace(drafter_class(name).Config(), **sizes), config
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(lambda k: drafter.init(k, backbone), key)
    params = jax.eval_shape(lambda p: store(p, Storage(weights=weights)), params)
    hidden, tokens, positions, segments = rows_of(config, drafter.taps)
    tree, n_B = Tree.cartesian([2, 2, 1]), jnp.full((B,), 2, jnp.int32)

    def decode(params):
        state = drafter.start(B, SLOTS, jnp.float32)
        new = Committed(hidden, tokens, tokens, positions, n_B)
        state = drafter.commit(params, backbone, state, new)
        return drafter.propose(
            params, backbone, state, DraftRequest(n_B, tree, lambda depth, x: Ranked(x, x))
        )

    def train(params):
        features = drafter.features(
            params, backbone, TextRows(hidden, tokens, positions, segments)
        )
        return [drafter.head_logits(params, backbone, k, features[k]) for k in range(3)]

    check(decode, params)
    check(train, params)


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        ("backbone", {}),
        ("native", {}),
        ("medusa1", {"teacher_weight": 1.0, "hidden_noise": 1.0}),
        ("medusa2", {"remat": True}),
    ],
)
def test_losses_and_their_gradients(stage, more):
    """medusa2 with adapters on a quantised backbone, its loss the KL."""
    cfg = training_setup.tiny_config("", stage, **more)
    cfg.heads = HeadsConfig(n_heads=3, lm_head="low_rank", rank=8)
    key = jax.random.key(0)
    frozen = {"backbone": backbone_of(cfg.model.arch)}
    if stage == "medusa2":
        cfg.lora = LoraConfig(rank=4, dropout=0.1)
        cfg.model.path, cfg.train.backbone_loss = "somewhere", "kl"
        frozen = zeros(
            lambda f: {"backbone": quantise_backbone(f["backbone"], "nf4")}, frozen
        )
    elif stage != "medusa1":
        frozen = {}
    made = training_setup.stage_of(cfg, 10)
    params = jax.eval_shape(made.init, key, frozen)
    ints = jnp.zeros((B, 16), jnp.int32)
    batch = {"tokens": ints, "positions": ints, "segment_ids": ints + 1}
    batch["counted"] = ints == 0
    counts = jnp.ones((len(made.offsets),))

    def loss(params):
        return made.loss(params, frozen, losses.StepInputs(batch, counts, key))[0]

    check(jax.value_and_grad(loss), params)
