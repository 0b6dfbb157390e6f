"""Hydra++: the prefix layer against a plain numpy decoder layer, its cache, and its sizes."""

from functools import cache

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from family import drafter_of, numpy_lm_head, stored_base
from numpy_layers import numpy_layer, numpy_norm
from test_hydra import numpy_features, numpy_tree
from trees import WILD

from medusa_jax.heads.drafter import Committed, TextRows
from medusa_jax.heads.hydrapp import HydraPPConfig
from medusa_jax.heads.state import grown

pytestmark = pytest.mark.usefixtures("x64")


@cache
def problem():
    backbone = stored_base()
    heads = HydraPPConfig(n_layers=3, lm_head="low_rank", rank=5)
    return backbone, *drafter_of(heads, backbone)


def numpy_context(params, backbone, hidden_TD):
    """b_0 ... b_t of one text."""
    prefix = params["prefix"]
    out = numpy_layer(prefix["layers_0"], backbone.llama.config, hidden_TD)
    return numpy_norm(prefix["norm"]["scale"], out)


def test_features_are_those_of_the_paper():
    backbone, drafter, params = problem()
    rows = hidden, tokens, *_ = family.random_rows(np.random.default_rng(0))
    features = jax.jit(lambda p: drafter.features(p, backbone, TextRows(*rows)))(params)
    for b in range(2):
        context = numpy_context(params, backbone, hidden[b])
        for k in range(4):
            for t in range(12 - k - 1):
                following = tokens[b, t + 1 : t + k + 2]
                x = numpy_features(params, k, context[t], following, backbone)
                assert_close(features[k, b, t], x)


def test_a_tree_is_drafted_from_the_last_accepted_context():
    backbone, drafter, params = problem()
    rows = hidden, *_ = family.random_rows(np.random.default_rng(5))
    n, root = [3, 12], np.array([4, 0], np.int32)
    state = family.committed(drafter, backbone, params, rows, n)
    propose = family.proposed_logits(drafter, backbone, WILD)
    nodes, logits = propose(params, state, root)
    for b in range(2):
        context = numpy_context(params, backbone, hidden[b, : n[b]])[-1]

        def logits_of(path, context=context):
            k = len(path) - 1
            x = numpy_features(params, k, context, path, backbone)
            return numpy_lm_head(params[f"heads_{k}"], backbone, x)

        assert nodes[b].tolist() == numpy_tree(WILD, logits_of, root[b])
        assert_close(logits[0][b, 0], logits_of([root[b]]))


def test_the_cache_holds_accepted_positions_only():
    """What comes after n leaves no trace: another filling of it, the same later contexts."""
    backbone, drafter, params = problem()
    rng = np.random.default_rng(1)
    hidden, tokens, positions, _ = family.random_rows(rng, T=8)
    commit = jax.jit(lambda state, new: drafter.commit(params, backbone, state, new))
    contexts = []
    for filling in (0.0, 50.0):
        state = drafter.start(2, 64, jnp.float64)
        first = np.where(np.arange(8)[None, :, None] < 3, hidden, filling)
        new = Committed(first, tokens, tokens, positions, np.array([3, 3]))
        state = commit(state, new)
        np.testing.assert_array_equal(state.length_B, [3, 3])
        more = Committed(hidden, tokens, tokens, positions + 3, np.array([2, 0]))
        state = commit(state, more)
        np.testing.assert_array_equal(state.length_B, [5, 3])
        contexts.append(state.context_BSD)
    np.testing.assert_array_equal(*contexts)
    assert state.cache.layers[0][0].shape == (2, 2, 64, 6)
    assert grown(state, 96).cache.slots == 96
