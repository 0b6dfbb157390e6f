"""EAGLE-1: levels fed back to each other, against a plain numpy decoder layer; its start and sizes."""

from functools import cache

import family
import jax
import numpy as np
import pytest
from closeness import assert_close
from family import drafter_of, numpy_lm_head, stored_base
from numpy_layers import numpy_layer
from test_hydra import numpy_tree
from trees import WILD

from medusa_jax.config import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import make_drafter
from medusa_jax.heads.drafter import TextRows
from medusa_jax.heads.eagle import EagleConfig
from medusa_jax.heads.levels import Level, inner_nodes
from medusa_jax.model import causal
from medusa_jax.training import losses

pytestmark = pytest.mark.usefixtures("x64")


@cache
def problem(n_layers=2, lm_head="shared", fc_bias=True):
    backbone = stored_base()
    heads = EagleConfig(
        n_heads=4, n_layers=n_layers, lm_head=lm_head, rank=5, fc_bias=fc_bias
    )
    return backbone, *drafter_of(heads, backbone)


def numpy_reader(params, backbone, hidden_TD, tokens_T):
    """path -> f^ after it: tokens drafted after the text, the root first."""
    mine, known = params["heads_0"], {}
    embedding = backbone.params["embed_tokens"]["embedding"]

    def features(path):
        path = tuple(path)
        if path not in known:
            deeper = [features(path[:d])[None] for d in range(1, len(path))]
            rows = np.concatenate([hidden_TD, *deeper])
            following = embedding[[*tokens_T[1:], *path]]
            x = np.concatenate([following, rows], -1) @ mine["fc"]["kernel"]
            x = x + mine["fc"].get("bias", 0)
            for j in range(sum(name.startswith("layers_") for name in mine)):
                x = numpy_layer(mine[f"layers_{j}"], backbone.llama.config, x)
            known[path] = x[-1]
        return known[path]

    return features


@pytest.mark.parametrize(
    "fields",
    [{"n_layers": 1}, {}, {"lm_head": "low_rank", "n_layers": 1, "fc_bias": False}],
)
def test_features_and_logits_are_those_of_the_paper(fields):
    backbone, drafter, params = problem(**fields)
    assert ("bias" in params["heads_0"]["fc"]) == fields.get("fc_bias", True)
    rows = hidden, tokens, *_ = family.random_rows(np.random.default_rng(0), B=1)
    features, logits = family.features_and_logits(drafter, params, backbone, rows)
    for t in (0, 3, 7):
        read = numpy_reader(params, backbone, hidden[0, : t + 1], tokens[0, : t + 1])
        for k in range(4):
            x = read(tokens[0, t + 1 : t + k + 2])
            assert_close(features[k, 0, t], x)
            assert_close(logits[k][0, t], numpy_lm_head(params["heads_0"], backbone, x))


def test_a_tree_is_drafted_along_its_paths():
    """Features and logits of every node that has children, each after its own path."""
    backbone, drafter, params = problem()
    rows = hidden, tokens, *_ = family.random_rows(np.random.default_rng(5))
    n = [3, 12]
    root = tokens[[0, 1], [3, 0]]  # what `committed` says comes after the last position
    state = family.committed(drafter, backbone, params, rows, n)
    propose = family.proposed_logits(drafter, backbone, WILD)
    nodes, logits, state = jax.tree.map(np.asarray, (*propose(params, state, root), state))
    for b in range(2):
        read = numpy_reader(params, backbone, hidden[b, : n[b]], tokens[b, : n[b]])
        assert_close(state.context_BSD[b, 0], read([root[b]]))

        def logits_of(path, read=read):
            return numpy_lm_head(params["heads_0"], backbone, read(path))

        assert nodes[b].tolist() == numpy_tree(WILD, logits_of, root[b])
        for depth, inner in enumerate(inner_nodes(Level.of(WILD), WILD)):
            paths = [WILD.ancestors_ML[node, : depth + 1] for node in inner]
            want = [logits_of(nodes[b][path].tolist()) for path in paths]
            assert_close(logits[depth][b], np.stack(want))


def test_blocks_of_positions_are_all_positions_at_once(monkeypatch):
    """Three blocks, the last one partly beyond the rows, over two texts in a row."""
    backbone, drafter, params = problem()
    hidden, tokens, positions, segments = family.random_rows(np.random.default_rng(2))
    segments = np.where(positions < 7, 1, 2).astype(np.int32)
    positions = np.where(positions < 7, positions, positions - 7).astype(np.int32)
    found = []
    for size in (64, 5):
        monkeypatch.setattr(causal, "BLOCK", size)
        run = jax.jit(lambda p, *rows: drafter.features(p, backbone, TextRows(*rows)))
        found.append(run(params, hidden, tokens, positions, segments))
    assert_close(*found)


TARGETS = losses.HeadTargets(label_weight=0.25, teacher_weight=0.5, feature_weight=3.0)


def numpy_log_softmax(x):
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


@pytest.mark.parametrize("levels", [1, 3])
def test_the_loss_over_levels_and_its_gradient_through_them(levels, monkeypatch):
    """sum_k decay^k (3 smooth L1 to the hidden state + CE / 4 with text + CE / 2 with the backbone),
    each level's mean over the pairs of that distance; each level reads the one above."""
    monkeypatch.setattr(causal, "BLOCK", 4)
    backbone, drafter, params = problem(n_layers=1)
    kernel = backbone.params["lm_head"]["kernel"]

    def numpy_loss(params, rows, counted):
        terms = [[] for _ in range(levels)]
        for k, t, h, ids in family.level_pairs(rows, counted, levels):
            read = numpy_reader(params, backbone, h[: t + 1], ids[: t + 1])
            x = read(ids[t + 1 : t + k + 2])
            logp = numpy_log_softmax(x @ kernel)
            teacher = np.exp(numpy_log_softmax(h[t + k + 1] @ kernel))
            apart = np.abs(x - h[t + k + 1])
            smooth = np.where(apart < 1, 0.5 * apart**2, apart - 0.5).mean()
            soft = -(teacher * logp).sum()
            terms[k].append(3.0 * smooth - 0.25 * logp[ids[t + k + 2]] + 0.5 * soft)
        return sum(0.7 ** (k + 1) * np.mean(x) for k, x in enumerate(terms))

    family.check_levels_loss(drafter, params, backbone, TARGETS, numpy_loss, levels, 0.7)


@pytest.mark.wide
def test_levels_keep_no_scores_for_the_gradient():
    """Two more levels cost less memory than the scores of one."""
    B, T = 1, 1024
    backbone, drafter, params = problem(n_layers=1)
    shape = jax.ShapeDtypeStruct((B, T), np.int32)
    hidden = jax.ShapeDtypeStruct((B, T, family.D), np.float64)

    def held(levels):
        def loss(params, *rows):
            return (
                drafter.loss_view(levels).features(params, backbone, TextRows(*rows)).sum()
            )

        compiled = jax.jit(jax.grad(loss)).lower(params, hidden, *[shape] * 3).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = B * backbone.llama.config.n_heads * T * T * 8
    assert held(3) - held(1) < scores


def test_as_many_levels_as_trees_may_be_deep():
    _, drafter, _ = problem()
    assert drafter.loss_view(4).n_heads == 4 and drafter.loss_view().n_heads == 1
    for levels in (0, 5):
        with pytest.raises(UserError, match=f"from 1 to heads.n_heads 4, not {levels}"):
            drafter.loss_view(levels)
    medusa = make_drafter(HeadsConfig(), drafter.llama)
    assert medusa.loss_view() is medusa
    with pytest.raises(UserError, match=r"train\.levels 2 .* all heads of medusa train"):
        medusa.loss_view(2)
