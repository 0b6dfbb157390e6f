"""Streams of inner layers that come with the hidden states: in training, prefill and decoding."""

import dataclasses

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from family import D, stored_base
from numpy_layers import numpy_layer
from tiny import decoder

from medusa_jax.model.cache import KVCache
from medusa_jax.tree.tree import Tree

TAPS = (2, 0, 1)  # in the order that a drafter names them; two layers, so 2 is the output


def numpy_streams(backbone, tokens_T):
    """The residual stream before every layer and after the last: [n_layers + 1] of [T, D]."""
    params, x = backbone.params, backbone.params["embed_tokens"]["embedding"][tokens_T]
    streams = [x]
    for i in range(backbone.llama.config.n_layers):
        streams.append(
            numpy_layer(params[f"layers_{i}"], backbone.llama.config, streams[-1])
        )
    return streams


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("remat", [False, True])
def test_a_teacher_forced_pass_gives_the_streams_it_is_asked_for(remat):
    plain = stored_base()
    _, *rows = family.random_rows(np.random.default_rng(0))
    backbone = dataclasses.replace(plain, llama=plain.llama.clone(remat=remat))
    run = jax.jit(lambda b, *rows: b.forward(*rows))
    alone, wide = run(plain, *rows), run(backbone.tapped(TAPS), *rows)
    assert wide.shape == (2, 12, 4 * D)
    assert_close(wide[..., :D], alone)
    for b in range(2):
        streams = numpy_streams(plain, rows[0][b])
        for a, i in enumerate(TAPS, start=1):
            assert_close(wide[b, :, a * D : (a + 1) * D], streams[i])
    np.testing.assert_array_equal(plain.lm_head(alone), plain.lm_head(wide))


@pytest.mark.usefixtures("x64")
def test_a_prompt_and_a_tree_give_the_streams_of_their_paths():
    """A text of five tokens, then a tree whose nodes each continue it by their own path."""
    stored, tree = stored_base(), Tree.from_choices([[0], [1], [1, 0]])
    llama, params = decoder(stored.llama.config, stored.params)
    llama = llama.clone(taps=TAPS)
    config = llama.config
    text, nodes = np.array([3, 1, 4, 1, 5]), np.array([9, 2, 6, 5])
    sizes = (config.n_layers, 1, 16, config.n_kv_heads, config.head_dim)

    @jax.jit
    def run(params):
        five = jnp.array([5])
        cache = KVCache.zeros(*sizes, jnp.float64)
        given = (text[None], jnp.arange(5)[None], cache, jnp.array([0]))
        prompt, cache = llama.apply({"params": params}, *given, method="decode")
        given = (nodes[None], 5 + tree.depth_M[None], cache, five, tree.mask_MM)
        return prompt, llama.apply({"params": params}, *given, method="decode")[0]

    prompt, of_nodes = run(params)
    for node in range(4):
        path = np.flatnonzero(tree.mask_MM[node])
        streams = numpy_streams(stored, [*text, *nodes[path]])
        for a, i in enumerate(TAPS, start=1):
            assert_close(prompt[0, :, a * D : (a + 1) * D], streams[i][:5])
            assert_close(of_nodes[0, node, a * D : (a + 1) * D], streams[i][-1])
