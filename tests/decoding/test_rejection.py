"""Recursive rejection sampling against exact enumeration, on a verifier that is a Markov chain.

Three steps of the rule: draws in order, judged in order, the rest sampled. Every test of the law
has its mutations: a sampler broken on purpose must fail it.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, wide
from laws import agrees, law_of
from planted import filtered_scores, sampling_of, verified
from scipy.special import softmax

from medusa_jax.decoding.acceptance import rejection
from medusa_jax.decoding.acceptance.rejection import accept_rejection
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")

V, ROWS, ROOT = 5, 40_000, 2
TREE = Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1]])


def chain(seed, closeness):
    """log p(next | token) of a verifier and of the head at each depth, path by path."""
    rng = np.random.default_rng(seed)
    p_VV = 1.5 * rng.standard_normal((V, V))
    others = (1.5 * rng.standard_normal((V, V)) for _ in range(2))
    return p_VV, [closeness * p_VV + (1 - closeness) * q_VV for q_VV in others]


def step(p_VV, q_DVV, by_path, sampling, length_B, tree=TREE):
    """Draft, verify and accept one step of ROWS rows: (first two tokens, drafts accepted).

    by_path: the head sees the parent's token (as Hydra's do), else the root's only (Medusa's).
    """
    rows = length_B.shape[0]
    position_BL = length_B[:, None] + 1 + jnp.arange(tree.path_length)[None, :]
    g_BLV = rejection.draft_noise(sampling, position_BL, V, p_VV.dtype)
    T_B1 = sampling.temperature_B[:, None].astype(p_VV.dtype)
    nodes = [jnp.full((rows,), ROOT)] + [None] * (tree.n_nodes - 1)
    draft_logits = []
    for depth in range(tree.depth):
        parents = [v for v in tree.level(depth) if tree.children_MC[v, 0]]
        seen = [nodes[v] if by_path else nodes[0] for v in parents]
        logits_BPV = jnp.stack([jnp.asarray(q_DVV[depth])[t] for t in seen], axis=1)
        noise_B1V = g_BLV[:, depth][:, None]
        draws_BPV = jnp.argsort(-(logits_BPV + T_B1[..., None] * noise_B1V), axis=-1)
        for at, v in enumerate(parents):
            for j, child in enumerate(tree.children_MC[v]):
                if child:
                    nodes[child] = draws_BPV[:, at, j]
        draft_logits.append(logits_BPV if by_path else logits_BPV[:, 0])
    nodes_BM = jnp.stack(nodes, axis=1)
    logits_BMV = jnp.asarray(p_VV)[nodes_BM]
    given = tree, nodes_BM, logits_BMV, sampling, length_B, draft_logits
    got = accept_rejection(CpuKernels(), verified(*given))
    path_BM = jnp.take_along_axis(nodes_BM, got.path_BL, axis=1)
    tokens_BL = jnp.where(
        jnp.arange(tree.path_length)[None] < got.n_B[:, None],
        jnp.roll(path_BM, -1, axis=1),
        got.bonus_B[:, None],
    )
    return tokens_BL, got.n_B


one_step = jax.jit(step, static_argnums=(2, 5))


def run(seed, closeness, by_path, tree=TREE, rows=ROWS, patched=False, **fields):
    """Tokens and accepted drafts of many rows, one step each."""
    p_VV, q_DVV = chain(seed, closeness)
    sampling = sampling_of(rows, **({"temperature": 1.0} | fields))
    length_B = jnp.arange(rows, dtype=jnp.int32) % 7  # positions play no part in the law
    # A fresh function where something is patched: jit would remember the unpatched one.
    take = jax.jit(lambda *a: step(*a), static_argnums=(2, 5)) if patched else one_step
    tokens, n = take(p_VV, q_DVV, by_path, sampling, length_B, tree)
    return p_VV, np.asarray(tokens), np.asarray(n)


def conditional_laws(p_VV, **fields):
    """p(next | token) after temperature and filters [V, V]."""
    sampling = sampling_of(1, **({"temperature": 1.0} | fields))
    return softmax(np.asarray(filtered_scores(p_VV[None], sampling))[0], axis=-1)


def check(p_VV, tokens, n, **fields):
    """The first token of all rows, and the second of those that emitted two or more."""
    law_VV = conditional_laws(p_VV, **fields)
    ok = agrees(law_of(tokens[:, :1], V), law_VV[ROOT])
    for first in range(V):
        more = tokens[(tokens[:, 0] == first) & (n >= 1), 1:2]
        if len(more) > 500:
            ok &= agrees(law_of(more, V), law_VV[first])
    for first, second in itertools.product(range(V), repeat=2):
        both = (tokens[:, 0] == first) & (tokens[:, 1] == second)
        more = tokens[both & (n >= 2), 2:3]
        if len(more) > 500:
            ok &= agrees(law_of(more, V), law_VV[second])
    return ok


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 3},
    {"temperature": 1.4, "top_p": 0.8},
    {"temperature": 0.8, "min_p": 0.3},
]


@pytest.mark.parametrize("by_path", [True, *wide(False)])
@pytest.mark.parametrize("fields", thinned(CASES, CASES[0], CASES[-1]))
def test_every_token_has_the_verifiers_law(fields, by_path):
    for seed, closeness in ((0, 0.7), (1, 0.0)):
        p_VV, tokens, n = run(seed, closeness, by_path, **fields)
        assert check(p_VV, tokens, n, **fields)
        assert (np.bincount(n, minlength=3) > ROWS / 50).all()


MUTATIONS = {
    # Always the likeliest guesses, judged as if they had been drawn.
    "draft_noise": lambda sampling, at_BL, V, dtype: jnp.zeros((*at_BL.shape, V), dtype),
    # One number for every row and sibling.
    "uniform": lambda key_B, at_B, n: jnp.full((at_B.shape[0], n), 0.5),
    # h is never renormalised: it keeps the scale it had before draws were removed.
    "normalised": lambda log_q_BV: jnp.exp(log_q_BV) / 8,
    # The rest is drawn without noise.
    "gumbel": lambda key_B, at_BL, V, dtype: jnp.zeros((*at_BL.shape, V), dtype),
    # Accepted by the raw verifier, without temperature.
    "log_target_probs": lambda kernels, logits, sampling: jax.nn.log_softmax(
        logits, axis=-1
    ),
}


@pytest.mark.parametrize("name", thinned(MUTATIONS, "uniform"))
def test_a_broken_sampler_is_noticed(name, monkeypatch):
    if name != "draft_noise":  # it calls the true gumbel
        true = rejection.gumbel
        noise = lambda s, at, V, dtype: true(  # noqa: E731
            s.stream(rejection.DRAFT).key_B, at, V, dtype
        )
        monkeypatch.setattr(rejection, "draft_noise", noise)
    monkeypatch.setattr(rejection, name, MUTATIONS[name])
    p_VV, tokens, n = run(0, 0.7, False, patched=True, temperature=0.6)
    assert not check(p_VV, tokens, n, temperature=0.6)


def test_drafts_that_share_the_verifiers_noise_are_noticed(monkeypatch):
    """A draft must be an independent draw, not the one that the rest is drawn with."""
    share = lambda s, at, V, dtype: rejection.gumbel(s.key_B, at, V, dtype)  # noqa: E731
    monkeypatch.setattr(rejection, "draft_noise", share)
    p_VV, tokens, n = run(1, 0.0, False, patched=True, temperature=1.0)
    assert not check(p_VV, tokens, n, temperature=1.0)


def test_a_head_that_equals_the_verifier_is_always_right():
    p_VV, _ = chain(3, 1.0)
    length_B = jnp.zeros(ROWS, jnp.int32)
    tokens, n = one_step(p_VV, [p_VV, p_VV], True, sampling_of(ROWS), length_B, TREE)
    # The first draw is never refused, and its first child neither.
    assert (np.asarray(n) == 2).all()
    first = np.asarray(tokens)[:, 0]
    assert check(p_VV, np.asarray(tokens), np.asarray(n)) and len(set(first.tolist())) == V


def test_temperature_zero_is_greedy():
    p_VV, tokens, n = run(0, 0.7, True, rows=64, temperature=0.0)
    best = p_VV.argmax(-1)
    at = np.full(64, ROOT)
    for i in range(3):
        there = n >= i
        assert (tokens[there, i] == best[at[there]]).all()
        at = np.where(there, tokens[:, i], at)
    assert len(set(n.tolist())) == 1


@pytest.mark.parametrize("temperature", [1e-4, 100.0])
def test_extreme_temperatures(temperature):
    p_VV, tokens, n = run(0, 0.5, True, temperature=temperature)
    assert check(p_VV, tokens, n, temperature=temperature)
    if temperature == 1e-4:
        assert (tokens[:, 0] == p_VV[ROOT].argmax()).all()


def test_drafts_of_probability_zero_are_never_taken():
    """The head is sure of a token that the verifier rules out."""
    p_VV = np.zeros((V, V))
    p_VV[:, :3] = -np.inf  # tokens 3 and 4 are all there is
    for other in (-1e4, -np.inf):  # next to no mass on the others, or none at all
        q_VV = np.full((V, V), other)
        q_VV[:, 0] = 0.0
        given = sampling_of(ROWS), jnp.zeros(ROWS, jnp.int32), TREE
        tokens, n = map(np.asarray, one_step(p_VV, [q_VV, q_VV], False, *given))
        assert check(p_VV, tokens, n)
        assert (n > 0).any() == (other > -np.inf)


def test_one_token_left_by_top_k():
    p_VV, tokens, n = run(0, 0.7, False, rows=500, temperature=1.0, top_k=1)
    assert (tokens[:, 0] == p_VV[ROOT].argmax()).all()
    assert n.max() > 0


def test_trees_that_are_not_dense_and_drafters_that_do_not_tell():
    logits = jnp.zeros((1, 2, V))
    given = jnp.zeros((1, 2), jnp.int32), logits, sampling_of(1), jnp.zeros(1, jnp.int32)
    accept = partial(accept_rejection, CpuKernels())
    with pytest.raises(ValueError, match="ranks 0, 1"):
        accept(verified(Tree((((1,)),)), *given, [logits[:, 0]]))
    with pytest.raises(ValueError, match="did not rank its guesses"):  # while it is traced
        jax.eval_shape(lambda: accept(verified(Tree.chain(1), *given)))
