"""Biases and penalties: whose definitions, where, and that drafts change no text with them."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import LIMITS, PROMPTS, SAMPLED, plain_texts, planted, random_model, texts_of
from tiny import forward_logits, tiny_arch
from trees import TreeArrays, trees

from medusa_jax.config import HeadsConfig
from medusa_jax.decoding import generate as loop
from medusa_jax.decoding.penalties import Asked, counts_down_paths, penalise, penalties_of
from medusa_jax.decoding.state import Engine
from medusa_jax.heads.drafter import Backbone
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.llama import Llama
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
SETTINGS = settings(max_examples=12, deadline=None, derandomize=True)
CONFIG = tiny_arch(vocab_size=11, n_layers=1)
# Rows of all kinds, the second of which asks for nothing.
ASKED = [
    Asked(presence=0.7, frequency=0.4, bias=((3, 2.0), (5, -100.0))),
    Asked(),
    Asked(repetition=4.0, frequency=-0.2),
]


def expected_scores(logits, prompt, text, asked):
    """Token by token, as OpenAI's reference and transformers' documentation say."""
    scores = np.array(logits, np.float64)
    for token, bias in asked.bias:
        scores[token] += bias
    for token in {*prompt, *text}:
        z, r = scores[token], asked.repetition
        scores[token] = z * r if z < 0 else z / r
    for token in set(text):
        scores[token] -= text.count(token) * asked.frequency + asked.presence
    return scores


@pytest.mark.parametrize("repetition", [0.5, 1.0, 1.7])
def test_bias_and_repetition_are_those_of_transformers(repetition):
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

    rng = np.random.default_rng(0)
    logits, asked = rng.standard_normal(6), Asked(0, 0, repetition, ((1, 2.5), (4, -1.0)))
    ids, scores = torch.tensor([[1, 1, 2, 4]]), torch.tensor(logits[None])
    bias = [[[token], value] for token, value in asked.bias]
    scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(repetition)(ids, scores)
    wanted = expected_scores(logits, [1, 1, 2], [4], asked)
    assert_close(scores.numpy()[0], wanted, dtype="float32")


NUMBERS = st.sampled_from([-1.5, 0.0, 0.5, 2.0])
TOKENS = st.lists(st.integers(0, 5), max_size=8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    TOKENS,
    TOKENS,
    st.builds(
        Asked,
        NUMBERS,
        NUMBERS,
        st.sampled_from([0.5, 1.0, 1.3, 4.0]),
        st.dictionaries(st.integers(0, 5), st.floats(-100, 100), max_size=3).map(
            lambda bias: tuple(bias.items())
        ),
    ),
    st.integers(0, 99),
)
def test_the_definitions_are_openais_and_transformers(prompt, text, asked, seed):
    logits = np.random.default_rng(seed).standard_normal(6)
    penalties = penalties_of([asked], [prompt or [0]], 6)
    if penalties is None:
        assert asked == Asked()
        return
    counts = np.bincount(np.array(text, int), minlength=6)[None, None]
    got = penalise(
        jnp.array(logits)[None, None], penalties, jnp.array(counts), jnp.zeros(1, int)
    )[0, 0]
    wanted = expected_scores(logits, prompt or [0], text, asked)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@partial(jax.jit, static_argnums=())
def counts_of(counts_BV, nodes_BM, tree):
    return counts_down_paths(counts_BV, nodes_BM, tree)


@SETTINGS
@given(trees(9, 3), st.integers(0, 99))
def test_every_node_counts_its_own_path(tree, seed):
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 3, (2, 4))
    nodes = rng.integers(0, 4, (2, tree.n_nodes))
    got = np.asarray(counts_of(before, nodes, TreeArrays.of(tree)))
    for row in range(2):
        for node in range(tree.n_nodes):
            path = np.flatnonzero(tree.mask_MM[node])[1:]  # the root is counted
            more = np.bincount(nodes[row, path], minlength=4)
            assert got[row, node].tolist() == (before[row] + more).tolist()


def request_of(acceptance, asked=ASKED):
    fields = SAMPLED if acceptance == "sampled" else {}
    return loop.Request(PROMPTS, LIMITS, penalties=asked, **fields)


@cache
def reference(seed, acceptance, asks=True):
    """What the plain loop emits."""
    request = request_of(acceptance, ASKED if asks else None)
    model = random_model(CONFIG, seed)[1:]
    return request, plain_texts(CONFIG, *model, request, acceptance)


def test_the_plain_loop_takes_the_best_penalised_token():
    for seed in range(2):
        params, *_ = random_model(CONFIG, seed)
        _, texts = reference(seed, "greedy")
        free = reference(seed, "greedy", asks=False)[1]
        assert texts[0] != free[0] and texts[1] == free[1] and texts[2] != free[2]
        for prompt, text, asked in zip(PROMPTS, texts, ASKED):
            logits = forward_logits(CONFIG, params, prompt + text)
            for t, token in enumerate(text):
                row = logits[len(prompt) + t - 1]
                scores = expected_scores(row, prompt, text[:t], asked)
                assert token == scores.argmax()


@pytest.mark.parametrize("acceptance", ["rejection", *wide("typical")])
def test_other_rules_judge_by_penalised_logits(acceptance):
    """A token that is as good as barred never comes, and one that is as good as forced does."""
    params, llama, backbone = random_model(CONFIG, 0)
    drafter = make_drafter(HeadsConfig(n_heads=2), CONFIG)
    engine = Engine(llama, drafter, Tree.cartesian([2, 2]), acceptance)
    asked = [
        Asked(bias=((7, 300.0),)),
        Asked(presence=1000.0),
        Asked(bias=tuple((i, -1e4) for i in range(9))),
    ]
    request = loop.Request(PROMPTS, [9] * 3, temperature=[1.0, 1.0, 2.0], penalties=asked)
    heads = drafter.init(jax.random.key(0), Backbone(Llama(CONFIG, jnp.float64), params))
    progress = loop.generate(engine, {"backbone": backbone, "heads": heads}, request)
    first, second, third = texts_of(progress)
    assert first == [7] * 9 and len(set(second)) == 9 and set(third) <= {9, 10}
    # Drafts are ranked with the penalties of the root: what is forced is drafted.
    assert np.asarray(progress.histogram_BL)[0, -1] >= 2


def test_log_probabilities_stay_the_models_own():
    params, llama, backbone = random_model(CONFIG, 0)
    request, [text, *_] = reference(0, "greedy")
    engine = Engine(llama, planted(CONFIG), Tree.none(), logprobs=0)
    progress = loop.generate(engine, {"backbone": backbone, "heads": {}}, request)
    logits = forward_logits(CONFIG, params, PROMPTS[0] + text)[len(PROMPTS[0]) - 1 : -1]
    log_p = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(text)), text]
    assert_close(np.asarray(progress.logprobs.token_BO)[0, : len(text)], log_p)
