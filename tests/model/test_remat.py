"""Recomputation: the same gradients in less memory, on a CPU too, which drops barriers."""

from functools import partial

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


def loss(config, remat, dropout, trained, frozen, tokens, key):
    """Of hidden states; trained is the backbone, or adapters on the frozen one, whose inputs are dropped."""
    variables = {"params": trained}
    if frozen:
        scaled = lora.scale(trained, LoraConfig(rank=4, alpha=8.0, dropout=dropout))
        variables = {"params": frozen, "lora": lora.with_dropout(scaled, key)}
    llama = Llama(config, jax.dtypes.canonicalize_dtype(float), remat=remat)
    rows = tokens, tokens % tokens.shape[1], jnp.ones_like(tokens)
    return jnp.sum(llama.apply(variables, *rows, method="forward") ** 3)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("adapters", "dropout"), [(False, 0.0), (True, 0.5), *wide((True, 0.0))]
)
def test_gradients_are_the_same(adapters, dropout):
    """Of adapters on a quantised backbone, too: the recomputed pass drops the same inputs and reads the same codes."""
    config = tiny_arch(d_model=64, d_ff=64)
    params = jax.tree.map(jnp.asarray, random_params(config, 4))
    given = params, {}
    if adapters:
        fresh = lora.init_lora(config, jax.random.key(0), 4)
        moved = jax.tree.map(lambda x: jnp.float64(x) + 0.1, fresh)
        given = moved, quantise_backbone(params, "nf4")
    given += jnp.arange(12).reshape(2, 6), jax.random.key(1)
    again, plain = (
        jax.jit(jax.grad(partial(loss, config, remat, dropout)))(*given)
        for remat in (True, False)
    )
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain)) > 0.1
    assert_close(again, plain, 1024)  # sums over all tokens, in other orders


def temporaries(layers, remat, adapters):
    """Bytes that a gradient needs in addition to parameters and result."""
    config = tiny_arch(n_layers=layers, d_model=64, d_ff=256)
    key = jax.ShapeDtypeStruct((), jax.eval_shape(jax.random.key, 0).dtype)
    params = jax.eval_shape(partial(init_params, config), key)
    given = jax.eval_shape(lambda k: lora.init_lora(config, k, 4), key)
    given = (given, params) if adapters else (params, {})
    tokens = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    gradient = jax.jit(jax.grad(partial(loss, config, remat, 0.1)))
    program = gradient.lower(*given, tokens, key).compile()
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
