"""Barred n-grams: what is barred, where, and by whom (any tree: test_exactness.py)."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import (
    LIMITS,
    PROMPTS,
    SAMPLED,
    Planted,
    plain_texts,
    planted,
    planted_params,
    random_model,
    texts_of,
)
from tiny import decoder, forward_logits, random_params, tiny_arch
from trees import TreeArrays, trees

from medusa_jax.config import HeadsConfig
from medusa_jax.decoding import generate as loop
from medusa_jax.decoding.repeats import bar_repeats, node_texts
from medusa_jax.decoding.state import Engine
from medusa_jax.heads.drafter import Backbone, Proposal
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.llama import Llama
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
SETTINGS = settings(max_examples=12, deadline=None, derandomize=True)
N = 3
# Few tokens, so that bars matter.
CONFIG = tiny_arch(vocab_size=11, n_layers=1)


def grams(text, n):
    return [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]


def barred_tokens(text, n):
    """Tokens that must not follow `text`."""
    tail = tuple(text[len(text) - n + 1 :])
    return sorted({gram[-1] for gram in grams(text, n) if gram[:-1] == tail})


def check_no_repeats(prompt, text):
    old = grams(prompt, N)
    new = grams([*prompt, *text], N)[len(old) :]
    assert len(set(new)) == len(new) and not set(new) & set(old)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4))
def test_a_token_is_barred_if_it_completes_an_old_ngram(text, n):
    repeats = [v for v in range(4) if (g := grams([*text, v], n)) and g[-1] in g[:-1]]
    assert barred_tokens(text, n) == repeats


@partial(jax.jit, static_argnums=4)
def flat_logits_barred(text_BS, length_B, nodes_BM, tree, n):
    """Zeros [B, M, V = 3] with the bars after every node."""
    texts = node_texts(text_BS, length_B, nodes_BM, tree)
    last_BM = length_B[:, None] + tree.depth_M[None, :]
    return bar_repeats(jnp.zeros((*nodes_BM.shape, 3)), texts, last_BM, n)


@SETTINGS
@given(trees(9, 3), st.integers(0, 99), st.integers(1, 4))
def test_every_node_has_the_bars_of_its_path(tree, seed, n):
    """Two rows; after their text the buffer holds what must not count."""
    rng = np.random.default_rng(seed)
    V, S, length = 3, 30, np.array([rng.integers(0, 20), 20])
    text = rng.integers(0, V, (2, S))
    nodes = rng.integers(0, V, (2, tree.n_nodes))
    got = flat_logits_barred(text, length, nodes, TreeArrays.of(tree), n)
    for row in range(2):
        for node in range(tree.n_nodes):
            path = np.flatnonzero(tree.mask_MM[node])  # ancestors come first
            whole = [*text[row, : length[row]], *nodes[row, path]]
            barred = np.flatnonzero(np.isneginf(got[row, node])).tolist()
            assert barred == barred_tokens([int(t) for t in whole], n)


@cache
def reference(seed, acceptance, n=N):
    """What the plain loop emits, n-grams of size n barred."""
    sampled = SAMPLED if acceptance == "sampled" else {}
    request, model = (
        loop.Request(PROMPTS, LIMITS, **sampled),
        random_model(CONFIG, seed)[1:],
    )
    bars = {"no_repeat_ngram_size": n}
    return request, plain_texts(CONFIG, *model, request, acceptance, **bars)


@pytest.mark.parametrize("acceptance", ["sampled", *wide("greedy")])
def test_no_ngram_occurs_twice(acceptance):
    for seed in range(2):
        _, texts = reference(seed, acceptance)
        free = reference(seed, acceptance, 0)[1]
        assert texts != free
        for prompt, text in zip(PROMPTS, texts):
            check_no_repeats(prompt, text)


def test_the_plain_loop_takes_the_best_token_that_is_not_barred():
    for seed in range(2):
        params, *_ = random_model(CONFIG, seed)
        _, texts = reference(seed, "greedy")
        for prompt, text, limit in zip(PROMPTS, texts, LIMITS):
            assert len(text) == limit
            logits = forward_logits(CONFIG, params, prompt + text)
            for t, token in enumerate(text):
                before = [*prompt, *text[:t]]
                scores = np.array(logits[len(before) - 1])
                scores[barred_tokens(before, N)] = -np.inf
                assert token == scores.argmax()


@pytest.mark.wide
def test_the_text_grows_with_the_cache():
    """150 tokens after prompts of 5 and 120: the cache of 128 slots doubles on the way."""
    config = tiny_arch(vocab_size=60)
    params = random_params(config, 3)
    llama, backbone = decoder(config, params)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 4, n).tolist() for n in (5, 120)]
    request = loop.Request(prompts, [150, 150])

    def decode(tree, heads):
        engine = Engine(llama, planted(config), tree, no_repeat_ngram_size=2)
        variables = {"backbone": backbone, "heads": heads}
        *_, streamed = loop.stream(engine, variables, request, 5)
        texts = texts_of(loop.generate(engine, variables, request))
        assert texts_of(streamed) == texts
        return texts

    expected = decode(Tree.none(), {})
    known = [p + t for p, t in zip(prompts, expected)]
    heads = planted_params(known, 60, 0, slots=512)
    assert decode(Tree.chain(5), heads) == expected
    for prompt, text in zip(prompts, expected):
        new = grams([*prompt, *text], 2)[len(prompt) - 1 :]
        assert len(set(new)) == len(new) == 150


@pytest.mark.wide
@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_other_rules_never_give_a_barred_token(acceptance):
    params, llama, backbone = random_model(CONFIG, 0)
    drafter = make_drafter(HeadsConfig(n_heads=2), CONFIG)
    engine = Engine(
        llama, drafter, Tree.cartesian([2, 2]), acceptance, no_repeat_ngram_size=N
    )
    request = loop.Request(PROMPTS, LIMITS, temperature=[1.0, 0.5, 0.0])
    heads = drafter.init(jax.random.key(0), Backbone(Llama(CONFIG, jnp.float64), params))
    progress = loop.generate(engine, {"backbone": backbone, "heads": heads}, request)
    for prompt, text in zip(PROMPTS, texts_of(progress)):
        check_no_repeats(prompt, text)


@dataclasses.dataclass(frozen=True)
class Tempted(Planted):
    """Likes one token best that is barred after the root, if any is, and the true one next.

    `barred_BS` of its parameters: that token for a root at this position, or -1.
    """

    def propose(self, params, backbone, state, request):
        root_B, _, rank = request
        at_B1 = state[:, None]
        true_B1 = jnp.take_along_axis(params["text_BS"], at_B1 + 1, axis=1)
        barred_B1 = jnp.take_along_axis(params["barred_BS"], at_B1, axis=1)
        token_1V = jnp.arange(self.llama.vocab_size)[None, :]
        logits_BV = (true_B1 == token_1V) + 2.0 * (barred_B1 == token_1V)
        best_B = jnp.argmax(rank(1, logits_BV).scores, axis=-1)
        return Proposal(jnp.stack([root_B, best_B], axis=1))


def test_what_is_barred_after_the_root_is_not_drafted():
    _, llama, backbone = random_model(CONFIG, 0)
    request, expected = reference(0, "greedy")
    known = [p + t for p, t in zip(PROMPTS, expected)]
    barred = np.full((len(known), 256), -1)
    for row, text in enumerate(known):
        for at in range(len(text)):
            barred[row, at] = next(iter(barred_tokens(text[: at + 1], N)), -1)
    assert (barred >= 0).sum() > 10
    heads = planted_params(known, CONFIG.vocab_size, 0) | {"barred_BS": barred}
    drafter = Tempted(planted(CONFIG).heads, CONFIG)
    engine = Engine(llama, drafter, Tree.chain(1), no_repeat_ngram_size=N)
    progress = loop.generate(engine, {"backbone": backbone, "heads": heads}, request)
    assert texts_of(progress) == expected
    # Every draft is accepted; a last step may be cut by the limit.
    histogram = np.asarray(progress.histogram_BL)
    assert (histogram[:, 0] <= 1).all() and (histogram[:, 1] > 5).all()
