"""EAGLE-1: levels fed back to each other, against a plain numpy decoder layer; its start and sizes."""

from functools import cache

import family
import jax
import numpy as np
import pytest
from closeness import assert_close
from family import drafter_of, numpy_layer, numpy_lm_head, stored_base
from test_hydra import numpy_tree, parameters, vicuna

from medusa_jax.heads import eagle
from medusa_jax.heads.eagle import EagleConfig
from medusa_jax.heads.levels import Level, inner_nodes

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(("size", "billions"), [("7B", 0.24), ("13B", 0.37), ("33B", 0.62)])
def test_parameter_counts(size, billions):
    """However deep they draft."""
    for depth in (1, 5):
        n = parameters(EagleConfig(n_heads=depth), vicuna(size))
        assert abs(n / 1e9 / billions - 1) < 0.02


@cache
def problem(n_layers=2, lm_head="shared", fc_bias=True):
    backbone = stored_base()
    heads = EagleConfig(
        n_heads=4, n_layers=n_layers, lm_head=lm_head, rank=5, fc_bias=fc_bias
    )
    return backbone, *drafter_of(heads, backbone)


def numpy_reader(params, backbone, hidden_TD, tokens_T):
    """path -> f^ behind it: tokens drafted behind the text, the root first."""
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

    @jax.jit
    def both(params):
        features = drafter.features(params, backbone, *rows)
        logits = [drafter.head_logits(params, backbone, k, features[k]) for k in range(4)]
        return features, logits

    features, logits = both(params)
    for t in (0, 3, 7):
        read = numpy_reader(params, backbone, hidden[0, : t + 1], tokens[0, : t + 1])
        for k in range(4):
            x = read(tokens[0, t + 1 : t + k + 2])
            assert_close(features[k, 0, t], x)
            assert_close(logits[k][0, t], numpy_lm_head(params["heads_0"], backbone, x))


def test_a_tree_is_drafted_along_its_paths():
    """Features and logits of every node that has children, each behind its own path."""
    backbone, drafter, params = problem()
    rows = hidden, tokens, *_ = family.random_rows(np.random.default_rng(5))
    n = [3, 12]
    root = tokens[[0, 1], [3, 0]]  # what `committed` says stands behind the last position
    state = family.committed(drafter, backbone, params, rows, n)
    propose = family.proposed_logits(drafter, backbone, family.WILD)
    nodes, logits = propose(params, state, root)
    for b in range(2):
        read = numpy_reader(params, backbone, hidden[b, : n[b]], tokens[b, : n[b]])
        assert_close(state.context_BSD[b, 0], read([root[b]]))

        def logits_of(path, read=read):
            return numpy_lm_head(params["heads_0"], backbone, read(path))

        assert nodes[b].tolist() == numpy_tree(family.WILD, logits_of, root[b])
        for depth, inner in enumerate(inner_nodes(Level.of(family.WILD), family.WILD)):
            paths = [family.WILD.ancestors_ML[node, : depth + 1] for node in inner]
            want = [logits_of(nodes[b][path].tolist()) for path in paths]
            assert_close(logits[depth][b], np.stack(want))


def test_chunks_of_positions_are_all_positions_at_once(monkeypatch):
    """Three chunks, the last one partly beyond the rows, over two texts in a row."""
    backbone, drafter, params = problem()
    hidden, tokens, positions, segments = family.random_rows(np.random.default_rng(2))
    segments = np.where(positions < 7, 1, 2).astype(np.int32)
    positions = np.where(positions < 7, positions, positions - 7).astype(np.int32)
    found = []
    for size in (64, 5):
        monkeypatch.setattr(eagle, "CHUNK", size)
        run = jax.jit(lambda p, *rows: drafter.features(p, backbone, *rows))
        found.append(run(params, hidden, tokens, positions, segments))
    assert_close(*found)


def test_the_start_passes_hidden_states_on():
    backbone, drafter, _ = problem()
    start = family.start_of(drafter, backbone)
    rows = hidden, *_ = family.random_rows(np.random.default_rng(0))
    features = jax.jit(lambda p: drafter.features(p, backbone, *rows))(start)
    for k in range(4):
        assert_close(features[k], hidden, dtype="float32")  # the type of fresh parameters
