"""Acceptance rules against slow, plain references."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import sampling_of, verified
from trees import TracedTree, trees

from medusa_jax.decoding.acceptance.rule import walk
from medusa_jax.decoding.acceptance.targets import (
    accept_down,
    accept_targets,
    target_tokens,
)
from medusa_jax.decoding.acceptance.typical import accept_typical
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.kernels.one_cpu import PanelKernels
from medusa_jax.model.kernels import Kernels
from medusa_jax.native import library
from medusa_jax.tree.tree import Tree

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def longest(tree, passes, score=None):
    """Brute force: every path, kept if all of it passes; the deepest, best, first one."""
    index = {(): 0} | {c: i + 1 for i, c in enumerate(tree.choices)}  # its node
    best = ()
    for path in sorted(index, key=index.get):
        if not all(passes[index[path[: d + 1]]] for d in range(len(path))):
            continue
        better = score is not None and score[index[path]] > score[index[best]]
        if len(path) > len(best) or (len(path) == len(best) and better):
            best = path
    return [index[best[:d]] for d in range(len(best) + 1)]


def padded(tree, nodes):
    return nodes + [nodes[-1]] * (tree.path_length - len(nodes))


# Sizes are fixed so that one compilation serves all examples.
traced_walk = jax.jit(walk)


@SETTINGS
@given(trees(10, 3), st.integers(0, 2**20), st.sampled_from([0.3, 0.6, 0.9]))
def test_walk_finds_the_longest_path_that_matches(tree, seed, p):
    rng = np.random.default_rng(seed)
    matched = rng.random((4, 10)) < p
    score = rng.standard_normal((4, 10)).astype(np.float32)
    arrays = TracedTree.of(tree)
    for tie_break in (None, score):
        path_BL, n_B, best_B = traced_walk(matched, arrays, tie_break)
        for row in range(4):
            nodes = longest(tree, matched[row], None if tie_break is None else score[row])
            assert np.asarray(path_BL)[row].tolist() == padded(tree, nodes)
            assert int(n_B[row]) == len(nodes) - 1
            assert int(best_B[row]) == nodes[-1]


@jax.jit
def both_ways(nodes, logits, tree, sampling, length):
    """Target tokens of all nodes at once, as on an accelerator, and down the path, as on a CPU."""
    v = verified(tree, nodes, logits, sampling, length)
    kernels = CpuKernels()
    tokens = target_tokens(kernels, logits, v.positions_BM, sampling, tree)
    return accept_targets(nodes, tokens, tree), accept_down(kernels, v)


@pytest.mark.usefixtures("x64")
@SETTINGS
@given(trees(10, 3), st.integers(0, 2**20))
def test_a_cpu_computes_target_tokens_of_the_accepted_path_alone(tree, seed):
    """Siblings often hold one token; a node's text decides its logits, so these have the same."""
    rng = np.random.default_rng(seed)
    nodes = rng.integers(0, 3, (4, 10)).astype(np.int32)
    texts = [(row, *nodes[row, path]) for row in range(4) for path in tree.ancestors_ML]
    of_text = {text: 4 * rng.standard_normal(3) for text in texts}
    logits = np.array([of_text[text] for text in texts]).reshape(4, 10, 3)
    sampling = sampling_of(4, np.array([1.0, 0.0, 0.7, 1.2]), top_p=0.9)
    outcomes = both_ways(nodes, logits, TracedTree.of(tree), sampling, np.arange(4))
    for at_once, down in zip(*outcomes):
        np.testing.assert_array_equal(at_once, down)


def typical_reference(tree, nodes, logits, temperature, epsilon, delta):
    """The paper's rule, written out with floats and loops (no filters)."""
    log_p = []
    for row in logits / temperature:
        total = math.log(sum(math.exp(x) for x in row))
        log_p.append([float(x) - total for x in row])
    passes, score = [True], [0.0]
    for node in range(1, tree.n_nodes):
        after = log_p[tree.parent_M[node]]
        entropy = -sum(math.exp(x) * x for x in after)
        mine = after[nodes[node]]
        passes.append(math.exp(mine) > min(epsilon, delta * math.exp(-entropy)))
        score.append(score[tree.parent_M[node]] + mine)
    path = longest(tree, passes, score)
    return path, int(np.argmax(logits[path[-1]]))


def accepted(*given):
    return accept_typical(CpuKernels(), verified(*given))


traced_typical = jax.jit(accepted)
typical = jax.jit(accepted, static_argnums=0)


@pytest.mark.usefixtures("x64")
def test_typical_acceptance_is_the_papers_rule():
    lengths = set()

    @SETTINGS
    @given(
        trees(10, 3),
        st.integers(0, 2**20),
        st.sampled_from([0.3, 0.7, 1.0, 1.5]),
        st.sampled_from([(0.09, 0.3), (0.3, 0.55), (0.01, 0.1)]),
    )
    def check(tree, seed, temperature, thresholds):
        rng = np.random.default_rng(seed)
        logits = 2 * rng.standard_normal((2, 10, 8))
        nodes = rng.integers(0, 8, (2, 10)).astype(np.int32)
        epsilon, delta = thresholds
        sampling = sampling_of(2, temperature)
        sampling = sampling.replace(
            epsilon_B=np.full(2, epsilon), delta_B=np.full(2, delta)
        )
        got = traced_typical(TracedTree.of(tree), nodes, logits, sampling)
        for row in range(2):
            # Temperatures are stored as float32.
            args = (np.float64(np.float32(temperature)), *thresholds)
            path, bonus = typical_reference(tree, nodes[row], logits[row], *args)
            assert np.asarray(got.path_BL)[row].tolist() == padded(tree, path)
            assert int(got.bonus_B[row]) == bonus
            lengths.add(len(path) - 1)

    check()
    assert lengths == {0, 1, 2, 3}


def test_typical_acceptance_never_takes_a_filtered_token():
    tree = Tree.chain(1)
    logits = jnp.array([[[3.0, 2.9, 2.8], [0.0, 1.0, 0.0]]])
    for top_k, n in ((0, 1), (1, 0), (2, 1)):
        got = typical(tree, np.array([[0, 1]]), logits, sampling_of(1, top_k=top_k))
        assert got.n_B.tolist() == [n]
        assert got.bonus_B.tolist() == [1 if n else 0]


def test_typical_ties_go_to_the_likelier_path_even_over_impossible_siblings():
    """Filtered tokens have log-probability minus infinity, which must not spoil the sums."""
    tree = Tree.from_choices([[0], [1], [2], [0, 0], [1, 0]])
    logits = jnp.array([[[2.0, 2.2, -9.0, -9.0]] + [[1.0, 0.0, 0.0, 0.0]] * 5])
    nodes = jnp.array([[3, 0, 1, 2, 0, 0]])
    got = typical(tree, nodes, logits, sampling_of(1, top_k=2))
    assert got.path_BL.tolist() == [[0, 2, 5]]


def test_typical_thresholds_belong_to_rows_and_temperature_zero_is_greedy():
    """One draft of probability about 0.27 after a root of entropy about one nat."""
    tree = Tree.chain(1)
    logits = jnp.tile(jnp.array([[[1.0, 0.0, -9.0], [0.0, 1.0, 0.0]]]), (4, 1, 1))
    nodes = jnp.array([[0, 1], [0, 1], [0, 1], [0, 0]])
    sampling = sampling_of(4).replace(
        temperature_B=jnp.array([1.0, 1.0, 0.0, 0.0]),
        epsilon_B=jnp.array([0.2, 0.3, 0.2, 0.2]),
        delta_B=jnp.array([5.0, 5.0, 5.0, 5.0]),
    )
    got = typical(tree, nodes, logits, sampling)
    assert got.n_B.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("kernels", [Kernels(), PanelKernels()])
@pytest.mark.parametrize("V", [4, 576, 1003, 4096])
def test_best_token_is_the_first_of_equals_even_of_strange_rows(V, kernels):
    if isinstance(kernels, PanelKernels) and library() is None:
        pytest.skip("no compiler")
    best_token = jax.jit(kernels.best_token)
    rows = np.random.default_rng(V).integers(0, 4, (2, 8, V)).astype(np.float32)
    rows[0, 1, [V // 2, V - 1]] = 9
    rows[0, 2, [V // 2, V - 1]] = np.inf
    assert best_token(rows).tolist() == rows.argmax(-1).tolist()
    rows[0, 0], rows[:, 3:, 0] = -np.inf, np.nan
    rows[:, 4, 0], rows[:, 4, V - 1] = 1, np.nan
    best = np.asarray(best_token(rows))
    assert best.dtype == np.int32 and (best[:, 3:] == V).all() and best[0, 0] == V
    assert (best[0, 1:3] < V).all() and (best[1, :3] < V).all()
