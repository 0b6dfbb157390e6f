"""Medusa, Hydra and Hydra++ against the papers' equations in plain numpy: heads, trees, the prefix layer."""

import family
import jax
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from family import numpy_lm_head
from numpy_layers import numpy_layer, numpy_norm, silu
from trees import WILD

from medusa_jax.config import HeadsConfig
from medusa_jax.heads.drafter import DraftRequest, Ranked, TextRows
from medusa_jax.heads.hydra import HydraConfig
from medusa_jax.heads.hydrapp import HydraPPConfig
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")


def problem(kind=HydraConfig, **fields):
    return family.problem(kind(**{"n_layers": 2, "rank": 5} | fields))


def numpy_contexts(params, backbone, hidden_TD):
    """b_0 ... b_t of one text: hidden states, of Hydra++ after its prefix layer and norm."""
    if "prefix" not in params:
        return hidden_TD
    layer, norm = params["prefix"]["layers_0"], params["prefix"]["norm"]["scale"]
    return numpy_norm(norm, numpy_layer(layer, backbone.llama.config, hidden_TD))


def numpy_features(params, k, context, tokens, backbone):
    """Head k (0-based) for one position: b_t [D] and the k + 1 tokens after it, which Medusa does not read."""
    embedding = backbone.params["embed_tokens"]["embedding"]
    x = np.concatenate([context, *(embedding[t] for t in tokens)])
    head = params[f"heads_{k}"]
    first, medusa = head["layers_0"], "kernel" in head["layers_0"]
    if medusa:
        x = context
    else:
        wide = x @ first["linear"]["kernel"] + first["linear"]["bias"]
        if "skip" in first:
            context = x @ first["skip"]["kernel"] + first["skip"]["bias"]
        x = context + silu(wide)
    for j in range(not medusa, sum(name.startswith("layers") for name in head)):
        x = x + silu(x @ head[f"layers_{j}"]["kernel"] + head[f"layers_{j}"]["bias"])
    return x


def numpy_tree(tree, logits_of, width):
    """Node tokens by recursion over paths; logits_of(tokens of the path, root first)."""
    tokens = {(): width}
    for choice in tree.choices:
        path = [tokens[choice[:d]] for d in range(len(choice))]
        tokens[choice] = int(np.argsort(-logits_of(path), kind="stable")[choice[-1]])
    return [width, *(tokens[c] for c in tree.choices)]


PLUS = {"kind": HydraPPConfig, "n_layers": 3, "lm_head": "low_rank"}
KINDS = [("own", "identity"), ("shared", "fixed"), ("low_rank", "random")]
HEADS = [PLUS, *({"lm_head": lm_head, "skip": skip} for lm_head, skip in KINDS)]
HEADS += [{"kind": HeadsConfig, "lm_head": lm_head} for lm_head, _ in KINDS]
TREES = [WILD, Tree.cartesian([2, 2, 1])]


@pytest.mark.parametrize("fields", HEADS)
def test_features_and_logits_are_those_of_the_paper(fields):
    backbone, drafter, params = problem(**fields)
    rows = hidden, tokens, *_ = family.random_rows(np.random.default_rng(0))
    features, logits = family.features_and_logits(drafter, params, backbone, rows)
    for b in range(2):
        contexts = numpy_contexts(params, backbone, hidden[b])
        for k in range(4):
            for t in range(12 - k - 1):
                following = tokens[b, t + 1 : t + k + 2]
                x = numpy_features(params, k, contexts[t], following, backbone)
                assert_close(features[k, b, t], x)
                expected = numpy_lm_head(params[f"heads_{k}"], backbone, x)
                assert_close(logits[k][b, t], expected)


@pytest.mark.parametrize(
    ("fields", "tree"),
    [
        (PLUS, WILD),
        *wide(*(({"lm_head": kind}, t) for kind in ("own", "shared") for t in TREES)),
        *(({"lm_head": "low_rank"}, tree) for tree in TREES),
        *(({"kind": HeadsConfig, "lm_head": kind}, WILD) for kind, _ in KINDS),
    ],
)
def test_a_tree_is_drafted_along_its_paths(fields, tree):
    """Each node holds the token of its rank in the scores after its own ancestors and the accepted
    text. Medusa's scores depend on the depth only."""
    backbone, drafter, params = problem(**fields)
    rng = np.random.default_rng(5)
    rows = family.random_rows(rng)
    n = [3, 12]
    state = family.committed(drafter, backbone, params, rows, n)
    noise = rng.standard_normal((4, 2, 23))

    @jax.jit
    def propose(state, root):
        def rank(depth, logits):
            of_all = noise[depth - 1] if logits.ndim == 2 else noise[depth - 1][:, None]
            return Ranked(logits, logits + of_all)

        request = DraftRequest(root, tree, rank)
        nodes, ranked = drafter.propose(params, backbone, state, request)
        return nodes, ranked[0].logits

    root = np.array([4, 0], np.int32)
    nodes, first = jax.tree.map(np.asarray, propose(state, root))
    for b in range(2):
        context = numpy_contexts(params, backbone, rows[0][b, : n[b]])[-1]

        def logits_of(path, context=context):
            k = len(path) - 1
            x = numpy_features(params, k, context, path, backbone)
            return numpy_lm_head(params[f"heads_{k}"], backbone, x)

        def noisy(path, b=b, logits_of=logits_of):
            return logits_of(path) + noise[len(path) - 1, b]

        assert nodes[b].tolist() == numpy_tree(tree, noisy, root[b])
        assert_close(first[b].ravel(), logits_of([root[b]]))


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
