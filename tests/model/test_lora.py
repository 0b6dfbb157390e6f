"""Adapters: what they add, that they switch off, that merging changes no logit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, wide
from closeness import assert_close
from shapes import SHAPES
from tiny import adapted_logits as logits

from medusa_jax.config import LlamaConfig, LoraConfig
from medusa_jax.model import lora
from medusa_jax.model.layers import Adapter
from medusa_jax.model.llama import init_params
from medusa_jax.model.quantise import dequantise_backbone, quantise_backbone

LORA = LoraConfig(rank=4, alpha=16.0, dropout=0.25)


def setup(tie, seed=0, **fields):
    config = LlamaConfig(
        vocab_size=48, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=24,
        max_position=32, tie_embeddings=tie, **fields,
    )  # fmt: skip
    params = init_params(config, jax.random.key(seed))
    adapters = lora.init_lora(config, jax.random.key(1), LORA.rank)
    rng = np.random.default_rng(0)
    move = lambda x: np.float32(x + 0.1 * rng.standard_normal(x.shape))  # noqa: E731
    return config, params, adapters, jax.tree.map(move, adapters)


def paths(tree):
    return {
        "/".join(k.key for k in path): leaf.shape
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


@pytest.mark.parametrize("tie", [True, *wide(False)])
def test_every_linear_layer_has_one_the_lm_head_included(tie):
    config, params, adapters, _ = setup(tie)
    shapes = paths(params).items()
    kernels = {p.removesuffix("/kernel"): s for p, s in shapes if "kernel" in p}
    if tie:
        kernels["lm_head"] = (16, 48)
    expected = {}
    for path, (n_in, n_out) in kernels.items():
        expected |= {f"{path}/a": (n_in, 4), f"{path}/b": (4, n_out)}
    assert paths(adapters) == expected
    assert lora.adapted_layers(config) == kernels


@pytest.mark.parametrize("tie", [True, *wide(False)])
def test_fresh_adapters_change_nothing_and_moved_ones_everything(tie):
    config, params, fresh, moved = setup(tie)
    plain = logits(config, params)
    assert_close(logits(config, params, lora.scale(fresh, LORA)), plain)
    adapted = lora.scale(moved, LORA)
    assert np.abs(logits(config, params, adapted) - np.asarray(plain)).max() > 0.1

    # Each B matters: its gradient is not zero, so no adapter is left out of the pass.
    def total(adapters):
        return jnp.sum(logits(config, params, lora.scale(adapters, LORA)) ** 2)

    grads = jax.jit(jax.grad(total))(moved)
    for path, grad in jax.tree_util.tree_flatten_with_path(grads)[0]:
        assert np.abs(grad).max() > 0, path


@pytest.mark.parametrize("tie", [False, *wide(True)])
def test_merging_gives_the_adapters_logits(tie):
    config, params, _, moved = setup(tie)
    adapted = logits(config, params, lora.scale(moved, LORA))
    merged_config, merged = lora.merge(config, params, moved, LORA)
    assert not merged_config.tie_embeddings
    assert_close(logits(merged_config, merged), adapted)
    # The scale alpha / rank = 4 is in there.
    trees = merged, moved, params
    now, adapter, before = (tree["layers_1"]["self_attn"]["q_proj"] for tree in trees)
    assert_close(now["kernel"], before["kernel"] + 4 * adapter["a"] @ adapter["b"])


@pytest.mark.parametrize("shape", thinned(SHAPES, "arcee", "gemma3"))
def test_every_shape_is_merged_and_quantised(shape):
    fields = {name: x for name, x in SHAPES[shape].items() if name != "tie_embeddings"}
    config, params, _, moved = setup(False, **fields)
    kernels = {p.removesuffix("/kernel") for p in paths(params) if "kernel" in p}
    assert lora.adapted_layers(config).keys() == kernels
    adapted = logits(config, params, lora.scale(moved, LORA))
    assert_close(logits(*lora.merge(config, params, moved, LORA)), adapted, roundings=1024)
    stored = quantise_backbone(params, "nf4")
    assert_close(logits(config, stored), logits(config, dequantise_backbone(stored)))


def test_dropout_needs_a_key_and_keeps_the_mean():
    """E[dropout(x)] = x: over many keys the adapter's term averages to the one without."""
    x = jnp.ones((1, 8))
    adapters = {"a": jnp.ones((8, 2)), "b": jnp.ones((2, 3))}
    stored = lora.scale(adapters, LoraConfig(rank=2, alpha=2.0, dropout=0.25))
    module = Adapter()
    zero = jnp.zeros((1, 3))

    @jax.jit
    @jax.vmap
    def terms_of(key):
        return module.apply({"lora": lora.with_dropout(stored, key)}, x, zero)

    terms = np.asarray(terms_of(jax.random.split(jax.random.key(0), 4000)))
    np.testing.assert_allclose(module.apply({"lora": stored}, x, zero), 16.0)
    np.testing.assert_allclose(terms.mean(), 16.0, rtol=0.02)
    # Of 8 inputs each survives with 3/4 and counts 4/3: variance 8 (4/3 - 1) (2 x 1)^2.
    np.testing.assert_allclose(terms[:, 0, 0].var(), 8 / 3 * 4, rtol=0.1)
