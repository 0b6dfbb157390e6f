"""Bars, biases, penalties and constraints equal other libraries' definitions, and drafts follow them.

`test_exactness.py` compares whole texts with these definitions, with and without drafts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from guides import Rule, V, barred_tokens, penalised
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import PROMPTS, decoded, fresh_medusa, texts_of
from tiny import tiny_arch
from trees import TracedTree, trees

from medusa_jax.decoding import generation
from medusa_jax.decoding.constrained import host_inputs
from medusa_jax.decoding.penalties import PenaltyOptions, penalise, penalties_of
from medusa_jax.decoding.repeats import bar_repeats, node_texts
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.token_sets import NO_TOKEN
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
CONFIG = tiny_arch(vocab_size=V, n_layers=1)


@jax.jit
def _texts_of_nodes(text_BS, length_B, nodes_BM, tree):
    return node_texts(text_BS, length_B, nodes_BM, tree)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(trees(9, 3), st.integers(0, 99), st.integers(1, 4))
def test_every_node_has_the_bars_of_its_path(tree, seed, n):
    """Two rows; after their text the buffer holds what must not count."""
    rng = np.random.default_rng(seed)
    kinds, S, length = 3, 30, np.array([rng.integers(0, 20), 20])
    text = rng.integers(0, kinds, (2, S))
    nodes = rng.integers(0, kinds, (2, tree.n_nodes))
    texts = _texts_of_nodes(text, length, nodes, TracedTree.of(tree))
    last = length[:, None] + tree.depth_M[None, :]
    flat = jnp.zeros((*nodes.shape, kinds))
    given = flat, texts, last, n, lambda ids: ids
    got = jax.jit(bar_repeats, static_argnums=(3, 4))(*given)
    for row, node in np.ndindex(2, tree.n_nodes):
        path = np.flatnonzero(tree.mask_MM[node])  # ancestors come first
        whole = [*text[row, : length[row]], *nodes[row, path]]
        barred = np.flatnonzero(np.isneginf(got[row, node])).tolist()
        assert barred == barred_tokens(whole, n, kinds)


@pytest.mark.parametrize("repetition", [0.5, 1.0, 1.7])
def test_bias_and_repetition_are_those_of_transformers(repetition):
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

    rng = np.random.default_rng(0)
    logits = rng.standard_normal(6)
    asked = PenaltyOptions(0, 0, repetition, ((1, 2.5), (4, -1.0)))
    ids, scores = torch.tensor([[1, 1, 2, 4]]), torch.tensor(logits[None])
    bias = [[[token], value] for token, value in asked.bias]
    scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(repetition)(ids, scores)
    wanted = penalised(logits, [1, 1, 2], [4], asked)
    assert_close(scores.numpy()[0], wanted, dtype="float32")


NUMBERS = st.sampled_from([-1.5, 0.0, 0.5, 2.0])
TOKENS = st.lists(st.integers(0, 5), max_size=8)
BIAS = st.dictionaries(st.integers(0, 5), st.floats(-100, 100), max_size=3)
REPETITION = st.sampled_from([0.5, 1.0, 1.3, 4.0])
BIASES = BIAS.map(lambda bias: tuple(bias.items()))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    TOKENS,
    TOKENS,
    st.builds(PenaltyOptions, NUMBERS, NUMBERS, REPETITION, BIASES),
    st.integers(0, 99),
)
def test_the_definitions_are_openais_and_transformers(prompt, text, asked, seed):
    logits = np.random.default_rng(seed).standard_normal(6)
    penalties = penalties_of([asked], [prompt or [0]], 6)
    if penalties is None:
        assert asked == PenaltyOptions()
        return
    counts = np.bincount(np.array(text, int), minlength=6)[None, None]
    got = penalise(logits[None, None], penalties, jnp.array(counts), jnp.zeros(1, int))
    wanted = penalised(logits, prompt or [0], text, asked)
    np.testing.assert_allclose(got[0, 0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("acceptance", ["rejection", *wide("typical")])
def test_other_rules_judge_by_penalised_logits(acceptance):
    """A token that is as good as barred never comes, and one that is as good as forced does."""
    engine, variables = fresh_medusa(CONFIG, Tree.cartesian([2, 2]), acceptance)
    asked = [
        PenaltyOptions(bias=((7, 300.0),)),
        PenaltyOptions(presence=1000.0),
        PenaltyOptions(bias=tuple((i, -1e4) for i in range(V - 2))),
    ]
    request = DecodeRequest(PROMPTS, [9] * 3, temperature=[1.0, 1.0, 2.0], penalties=asked)
    progress = decoded(engine, variables, request)
    first, second, third = texts_of(progress)
    assert first == [7] * 9 and len(set(second)) == 9 and set(third) <= {V - 2, V - 1}
    # Drafts are ranked with the penalties of the root, so heads draft the forced token.
    assert np.asarray(progress.histogram_BL)[0, -1] >= 2


def test_a_text_that_is_forced_is_drafted():
    """Untrained heads guess at random, so a draft is accepted only where the constraint allows one token."""
    engine, variables = fresh_medusa(CONFIG, Tree.chain(3), n_heads=3)

    def lengths(forcing):
        request = DecodeRequest([[4]], [41], guides=[Rule(3, forcing=forcing)])
        return np.asarray(decoded(engine, variables, request).histogram_BL)[0]

    assert lengths(1.0).tolist() == [0, 0, 0, 10]
    assert lengths(0.0)[3] < 5


def test_guesses_after_each_node():
    """The guesses after a node are scored as its children are; after a copied node, as its depth is."""
    tree = Tree.from_choices([[0], [1], [2], [0, 0], [0, 3], [-1], [-1, -1]])
    engine, variables = fresh_medusa(CONFIG, tree, "sampled")
    request = DecodeRequest([[4], [5]], [9, 9], temperature=[1.0, 0.5])
    state, _ = generation.begin(engine, variables, request)
    ahead = host_inputs(engine, variables, state)
    nodes, guesses = np.asarray(ahead.drafts.nodes_BM), np.asarray(ahead.guesses_BMK)
    for node in range(1, tree.n_nodes):
        if tree.rank_M[node] >= 0:
            best = guesses[:, tree.parent_M[node], tree.rank_M[node]]
            assert best.tolist() == nodes[:, node].tolist()
    copied, deepest = tree.copied_C
    assert (guesses[:, copied] == guesses[:, 2]).all() and (guesses[:, 0] >= 0).all()
    assert (guesses[:, deepest] == NO_TOKEN).all()
