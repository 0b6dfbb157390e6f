"""The backbone: cached passes equal the full pass, masks hide what they should, inner streams are returned."""

import dataclasses
from functools import partial

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from closeness import assert_close
from family import D, stored_base
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_layers import numpy_layer
from shapes import SHAPES
from tiny import decoder, forward_logits, random_params, tiny_arch
from trees import trees

from medusa_jax.model.cache import KVCache
from medusa_jax.model.convert import prepare
from medusa_jax.model.llama import Llama, decoding_config
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")

SETTINGS = settings(max_examples=8, deadline=None, derandomize=True)
FAMILIES = {
    "llama": {"tie_embeddings": True, "rope_scaling": "linear", "rope_factor": 2.0},
    "llama3": {"rope_scaling": "llama3", "rope_factor": 8.0}
    | {"rope_original_max_position": 64},
    "mistral": {"sliding_window": 5},
    "qwen2": {"qkv_bias": True, "sliding_window": 2, "window_layers": (False, True)},
    "qwen3": {"qk_norm": True, "out_bias": True, "mlp_bias": True},
} | SHAPES
SLOTS, CHUNK, NODES = 40, 4, 8


@partial(jax.jit, static_argnums=0)
def cached(llama, backbone, tokens, depth, cache, start, mask):
    def run(module):
        hidden, after = module.read_tree(tokens, depth, mask, cache, start)
        return module.lm_head(hidden), after

    return llama.apply({"params": backbone}, method=run)


def empty_cache(config, batch):
    """Filled with junk: a slot that was not written must not be seen."""
    zeros = KVCache.zeros(config, batch, SLOTS, jnp.float64)
    return jax.tree.map(lambda x: x + 50.0, zeros)


def read_in_chunks(llama, backbone, config, texts):
    """Ragged prefixes, read in chunks of unequal useful length; each row its own start.

    A chunk is padded; the padding is overwritten by the next one.
    """
    rng = np.random.default_rng(len(texts[0]))
    cache = empty_cache(config, len(texts))
    done = np.zeros(len(texts), np.int32)
    logits = [[] for _ in texts]
    while any(n < len(t) for n, t in zip(done, texts)):
        tokens = np.zeros((len(texts), CHUNK), np.int32)
        useful = []
        for row, text in enumerate(texts):
            n = min(int(rng.integers(0, CHUNK + 1)), len(text) - done[row])
            tokens[row, :n] = text[done[row] : done[row] + n]
            useful.append(n)
        depth, mask = np.arange(CHUNK), np.tril(np.ones((CHUNK, CHUNK), bool))
        out, cache = cached(llama, backbone, tokens, depth, cache, done, mask)
        for row, n in enumerate(useful):
            logits[row] += list(np.asarray(out)[row, :n])
        done = done + np.array(useful, np.int32)
    return cache, done, [np.array(x) for x in logits]


@pytest.mark.parametrize("family", thinned(FAMILIES, "mistral", "gemma3"))
def test_cached_passes_over_any_tree_equal_the_full_pass(family):
    """Every node's logits are those after prefix + its path, as plain text."""
    config = tiny_arch(**FAMILIES[family])
    params = random_params(config, 0)
    llama, backbone = decoder(config, params)

    @SETTINGS
    @given(trees(NODES, 3), st.integers(0, 2**20))
    def check(tree, seed):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 25, 2)
        texts = [rng.integers(0, config.vocab_size, n).tolist() for n in sizes]
        cache, start, prefix_logits = read_in_chunks(llama, backbone, config, texts)
        nodes = rng.integers(0, config.vocab_size, (2, NODES)).astype(np.int32)
        depth, mask = tree.depth_M, tree.mask_MM
        out, _ = cached(llama, backbone, nodes, depth, cache, start, mask)
        for row, text in enumerate(texts):
            expected = forward_logits(config, params, text)
            assert_close(prefix_logits[row], expected)
            assert expected.std() > 0.5
            for node in range(NODES):
                path = np.flatnonzero(tree.mask_MM[node])  # parents come first
                whole = forward_logits(config, params, text + nodes[row, path].tolist())
                assert_close(np.asarray(out)[row, node], whole[-1])

    check()


@pytest.mark.parametrize("family", thinned(FAMILIES, "qwen2", "arcee"))
def test_fusing_changes_nothing_for_any_number_of_shards(family):
    config = tiny_arch(**FAMILIES[family])
    params = random_params(config, 1)
    tokens = np.arange(6, dtype=np.int32)[None] * 3
    results = [forward_logits(config, params, tokens[0].tolist())[:6]]
    for shards in (1, 2):
        fused = prepare(params, config, jnp.float64, shards)
        kernel = fused["layers_0"]["self_attn"]["qkv_proj"]["kernel"]
        assert kernel.shape == (16, shards, (24 + 12 + 12) // shards)
        assert "q_proj" not in fused["layers_0"]["self_attn"]
        assert fused["lm_head"]["kernel"].shape == (16, 23)
        llama = Llama(decoding_config(config), jnp.float64, shards=shards)
        cache, start, mask = (
            empty_cache(config, 1),
            np.zeros(1, np.int32),
            np.tri(6, dtype=bool),
        )
        out, _ = cached(llama, fused, tokens, np.arange(6), cache, start, mask)
        results.append(np.asarray(out)[0])
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


def test_packed_segments_give_the_hidden_states_of_each_text_alone():
    config = tiny_arch(sliding_window=3, qk_norm=True)
    params = random_params(config, 3)
    llama = Llama(config, jnp.float64)
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 23, n).tolist() for n in (4, 6)]
    tokens = jnp.array([[*parts[0], *parts[1], 0, 0]])
    segments = jnp.array([[1] * 4 + [2] * 6 + [0] * 2])
    positions = jnp.array([[*range(4), *range(6), 0, 0]])

    @jax.jit
    def run(params):
        logits = lambda m: m.lm_head(m.forward(tokens, positions, segments))  # noqa: E731
        return llama.apply({"params": params}, method=logits)

    packed = np.asarray(run(params))[0]
    assert np.isfinite(packed).all()
    assert_close(packed[:4], forward_logits(config, params, parts[0]))
    assert_close(packed[4:10], forward_logits(config, params, parts[1]))


TAPS = (2, 0, 1)  # in the order that a drafter names them; two layers, so 2 is the output


def numpy_streams(backbone, tokens_T):
    """The residual stream before every layer and after the last: [n_layers + 1] of [T, D]."""
    params, x = backbone.params, backbone.params["embed_tokens"]["embedding"][tokens_T]
    streams, config = [x], backbone.llama.config
    for i in range(config.n_layers):
        streams.append(numpy_layer(params[f"layers_{i}"], config, streams[-1]))
    return streams


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


def test_a_prompt_and_a_tree_give_the_streams_of_their_paths():
    """A text of five tokens, then a tree whose nodes each continue it by their own path."""
    stored, tree = stored_base(), Tree.from_choices([[0], [1], [1, 0]])
    llama, params = decoder(stored.llama.config, stored.params)
    llama = llama.clone(taps=TAPS)
    config = llama.config
    text, nodes = np.array([3, 1, 4, 1, 5]), np.array([9, 2, 6, 5])

    @jax.jit
    def run(params):
        five = jnp.array([5])
        cache = KVCache.zeros(config, 1, 16, jnp.float64)
        given = (text[None], cache, jnp.array([0]))
        prompt, cache = llama.apply({"params": params}, *given, method="read")
        given = (nodes[None], tree.depth_M, tree.mask_MM, cache, five)
        return prompt, llama.apply({"params": params}, *given, method="read_tree")[0]

    prompt, of_nodes = run(params)
    for node in range(4):
        path = np.flatnonzero(tree.mask_MM[node])
        streams = numpy_streams(stored, [*text, *nodes[path]])
        for a, i in enumerate(TAPS, start=1):
            assert_close(prompt[0, :, a * D : (a + 1) * D], streams[i][:5])
            assert_close(of_nodes[0, node, a * D : (a + 1) * D], streams[i][-1])
