"""Hydra heads against the paper's equations in plain numpy, their start and their sizes."""

from functools import cache

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from family import drafter_of, numpy_lm_head, stored_base
from numpy_layers import silu
from trees import WILD

from medusa_jax.heads.drafter import DraftRequest, TextRows
from medusa_jax.heads.hydra import HydraConfig
from medusa_jax.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")


@cache
def problem(**fields):
    backbone = stored_base()
    heads = HydraConfig(**{"n_layers": 2, "rank": 5} | fields)
    return backbone, *drafter_of(heads, backbone)


def numpy_features(params, k, context, tokens, backbone):
    """Head k (0-based) for one position: b_t [D] and the k + 1 tokens after it."""
    embedding = backbone.params["embed_tokens"]["embedding"]
    x = np.concatenate([context, *(embedding[t] for t in tokens)])
    head = params[f"heads_{k}"]
    first = head["layers_0"]
    wide = x @ first["linear"]["kernel"] + first["linear"]["bias"]
    if "skip" in first:
        context = x @ first["skip"]["kernel"] + first["skip"]["bias"]
    x = context + silu(wide)
    for j in range(1, sum(name.startswith("layers") for name in head)):
        x = x + silu(x @ head[f"layers_{j}"]["kernel"] + head[f"layers_{j}"]["bias"])
    return x


def numpy_tree(tree, logits_of, width):
    """Node tokens by recursion over paths; logits_of(tokens of the path, root first)."""
    tokens = {(): width}
    for choice in tree.choices:
        path = [tokens[choice[:d]] for d in range(len(choice))]
        tokens[choice] = int(np.argsort(-logits_of(path), kind="stable")[choice[-1]])
    return [width, *(tokens[c] for c in tree.choices)]


KINDS = [("own", "identity"), ("shared", "fixed"), ("low_rank", "random")]


@pytest.mark.parametrize(("lm_head", "skip"), KINDS)
def test_features_and_logits_are_those_of_the_paper(lm_head, skip):
    backbone, drafter, params = problem(lm_head=lm_head, skip=skip)
    rows = hidden, tokens, *_ = family.random_rows(np.random.default_rng(0))
    features, logits = family.features_and_logits(drafter, params, backbone, rows)
    for k in range(4):
        for t in range(12 - k - 1):
            for b in range(2):
                following = tokens[b, t + 1 : t + k + 2]
                x = numpy_features(params, k, hidden[b, t], following, backbone)
                assert_close(features[k, b, t], x)
                assert_close(
                    logits[k][b, t], numpy_lm_head(params[f"heads_{k}"], backbone, x)
                )


@pytest.mark.parametrize("lm_head", [*wide("own", "shared"), "low_rank"])
@pytest.mark.parametrize("tree", [WILD, Tree.cartesian([2, 2, 1])])
def test_a_tree_is_drafted_along_its_paths(lm_head, tree):
    """Every node's token is a rank of the scores that its own ancestors give."""
    backbone, drafter, params = problem(lm_head=lm_head)
    rng = np.random.default_rng(5)
    rows = family.random_rows(rng)
    state = family.committed(drafter, backbone, params, rows, [3, 12])
    noise = rng.standard_normal((4, 2, 23))

    @jax.jit
    def propose(state, root):
        def scores(depth, logits):
            return logits + noise[depth - 1][:, None, :]

        return drafter.propose(params, backbone, state, DraftRequest(root, tree, scores))

    root = np.array([4, 0], np.int32)
    got = np.asarray(propose(state, root))
    for b, last in enumerate([2, 11]):

        def logits_of(path, b=b, context=rows[0][b, last]):
            k = len(path) - 1
            x = numpy_features(params, k, context, path, backbone)
            return numpy_lm_head(params[f"heads_{k}"], backbone, x) + noise[k, b]

        assert got[b].tolist() == numpy_tree(tree, logits_of, root[b])


def test_no_loop_over_nodes_is_left_in_the_program():
    """The drafted program has the same products whatever the width of the tree."""
    backbone, drafter, params = problem(lm_head="own")
    state = drafter.start(2, 64, jnp.float64)

    def products(tree):
        def run(params):
            return drafter.propose(
                params,
                backbone,
                state,
                DraftRequest(jnp.zeros(2, jnp.int32), tree, lambda d, x: x),
            )

        return str(jax.make_jaxpr(run)(params)).count("dot_general")

    # skip, linear, one more layer, LM head; per depth.
    assert products(Tree.chain(3)) == products(Tree.cartesian([5, 4, 3])) == 3 * 4


def test_tied_layers_are_one_layer_applied_again():
    backbone, tied, params = problem(n_layers=4, tie_layers=True)
    assert sorted(params["heads_0"]) == ["layers_0", "layers_1", "lm_head"]
    _, loose, _ = problem(n_layers=4)
    copies = {
        name: head | {"layers_2": head["layers_1"], "layers_3": head["layers_1"]}
        for name, head in params.items()
    }
    rows = family.random_rows(np.random.default_rng(0))
    features = [
        jax.jit(lambda p, d=d: d.features(p, backbone, TextRows(*rows)))(p)
        for d, p in ((tied, params), (loose, copies))
    ]
    np.testing.assert_array_equal(*features)
