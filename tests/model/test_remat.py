"""Recomputation: the same gradients in less memory, on a CPU too, which drops barriers."""

import jax
import jax.numpy as jnp
import pytest
from cases import wide
from closeness import assert_close
from tiny import random_params, tiny_arch

from medusa_jax.config import LoraConfig
from medusa_jax.model import lora
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.model.quantise import quantise_backbone


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dropout", [0.5, *wide(0.0)])
def test_adapters_on_a_quantised_backbone(dropout):
    """The recomputed pass drops the same inputs and reads the same codes."""
    config = tiny_arch(d_model=64, d_ff=64)
    params = jax.tree.map(jnp.asarray, random_params(config, 4))
    stored = quantise_backbone(params, "nf4")
    cfg = LoraConfig(rank=4, alpha=8.0, dropout=dropout)
    adapters = lora.init_lora(config, jax.random.key(0), 4)
    adapters = jax.tree.map(lambda x: jnp.float64(x) + 0.1, adapters)
    tokens = jnp.arange(12).reshape(2, 6)

    def loss(adapters, remat):
        given = lora.scale(adapters, cfg)
        if dropout:
            given = lora.with_dropout(given, jax.random.key(1))
        variables = {"params": stored, "lora": given}
        hidden = Llama(config, jnp.float64, remat=remat).apply(
            variables, tokens, tokens % 6, jnp.ones_like(tokens), method="forward"
        )
        return jnp.sum(hidden**3)

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    plain, again = grad(adapters, False), grad(adapters, True)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain)) > 0.1
    assert_close(again, plain, 1024)  # sums over all tokens, in other orders


def temporaries(layers, remat, adapters):
    """Bytes that a gradient of the sum of hidden states needs in addition to parameters and result.

    Args:
      adapters: of these, whose inputs are dropped; not of the backbone.
    """
    config = tiny_arch(n_layers=layers, d_model=64, d_ff=256)
    key = jax.ShapeDtypeStruct((), jax.eval_shape(jax.random.key, 0).dtype)
    params = jax.eval_shape(lambda k: init_params(config, k), key)
    given = jax.eval_shape(lambda k: lora.init_lora(config, k, 4), key)
    tokens = jax.ShapeDtypeStruct((4, 256), jnp.int32)

    def loss(trained, frozen, tokens, key):
        variables = {"params": trained}
        if adapters:
            scaled = lora.scale(trained, LoraConfig(rank=4, alpha=8.0, dropout=0.1))
            variables = {"params": frozen, "lora": lora.with_dropout(scaled, key)}
        hidden = Llama(config, remat=remat).apply(
            variables, tokens, tokens, tokens, method="forward"
        )
        return jnp.sum(hidden**2)

    trained, frozen = (given, params) if adapters else (params, {})
    program = jax.jit(jax.grad(loss)).lower(trained, frozen, tokens, key).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_a_layer_more_costs_its_input_only(adapters):
    more = {
        remat: temporaries(8, remat, adapters) - temporaries(4, remat, adapters)
        for remat in (False, True)
    }
    row = 4 * 256 * 64 * 4  # [B, T, D] in float32
    assert more[True] <= 4 * 3 * row, more[True] / row
    assert more[False] > 10 * more[True]
