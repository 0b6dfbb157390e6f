"""Medusa heads: a low-rank start, and proposals (other starts: test_starts.py)."""

import family
import jax
import numpy as np
import pytest
from closeness import assert_close
from family import stored_base
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_layers import silu
from trees import TreeArrays, trees

from medusa_jax.config import HeadsConfig
from medusa_jax.heads.drafter import DraftRequest, Ranked

pytestmark = pytest.mark.usefixtures("x64")

SETTINGS = settings(max_examples=15, deadline=None, derandomize=True)
KINDS = ["own", "shared", "low_rank"]


def heads_of(backbone, **fields):
    """A drafter, and parameters in which every part matters."""
    heads = HeadsConfig(**({"n_heads": 3, "rank": 5} | fields))
    return family.drafter_of(heads, backbone)


def test_low_rank_starts_as_the_best_approximation():
    backbone = stored_base()
    drafter, _ = heads_of(backbone, lm_head="low_rank", rank=5)
    start = family.start_of(drafter, backbone)["heads_0"]["lm_head"]
    error = np.linalg.norm(
        backbone.params["lm_head"]["kernel"] - start["down"] @ start["up"]
    )
    singular = np.linalg.svd(backbone.params["lm_head"]["kernel"], compute_uv=False)
    best = np.sqrt((singular[5:] ** 2).sum())
    assert_close(error, best, dtype="float32")  # the type of fresh parameters


def numpy_logits(params, backbone, k, hidden):
    """Head k on [D] by the paper's equation."""
    x = np.asarray(hidden)
    head = jax.tree.map(np.asarray, params[f"heads_{k}"])
    for j in range(sum(name.startswith("layers") for name in head)):
        x = x + silu(x @ head[f"layers_{j}"]["kernel"] + head[f"layers_{j}"]["bias"])
    return family.numpy_lm_head(head, backbone, x)


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_the_ranks_of_each_heads_scores(kind):
    """Against a numpy head and a numpy sort, with noise added to the scores of each depth."""
    backbone = stored_base()
    drafter, params = heads_of(backbone, lm_head=kind, n_layers=2)
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((4, 2, 23))

    @jax.jit
    def propose(params, hidden, root, tree):
        def rank(depth, logits):
            return Ranked(logits, logits + noise[depth])

        request = DraftRequest(root, tree, rank)
        return drafter.propose(params, backbone, hidden, request).nodes_BM

    @SETTINGS
    @given(trees(9, 3), st.integers(0, 2**20))
    def check(tree, seed):
        hidden = np.random.default_rng(seed).standard_normal((2, 16))
        root = np.array([4, 0], np.int32)
        got = np.asarray(propose(params, hidden, root, TreeArrays.of(tree)))
        np.testing.assert_array_equal(got[:, 0], root)
        for row in range(2):
            order = {}
            for k in range(3):
                scores = numpy_logits(params, backbone, k, hidden[row]) + noise[k + 1, row]
                order[k + 1] = np.argsort(-scores)
            expected = [order[len(path)][path[-1]] for path in tree.choices]
            assert got[row, 1:].tolist() == expected

    check()
