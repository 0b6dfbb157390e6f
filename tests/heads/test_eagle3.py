"""EAGLE-3 against numpy: streams fused, levels fed back, drafts of a tree, the loss of every level."""

from functools import cache

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from family import D, drafter_of, numpy_lm_head, stored_base
from numpy_layers import numpy_layer, numpy_norm
from test_hydra import numpy_tree
from tiny import tiny_arch
from trees import WILD

from medusa_jax.heads import make_drafter, vocabulary
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.heads.levels import Level, inner_nodes
from medusa_jax.model import causal
from medusa_jax.training import losses
from medusa_jax.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
IDS = np.array([0, 1, 3, 4, 6, 9, 10, 15, 17, 21, 22], np.int32)

# The paper's; 3.1; variants of published files, over a draft vocabulary.
PAPER, NEWER = {}, {"fc_norm": True, "norm_output": True}
VARIANT = {"n_layers": 2, "norm_before_residual": True, "tap_layers": "1,2"}


@pytest.mark.parametrize(
    ("n_layers", "given", "expected"),
    [
        (32, "", (2, 16, 29)),
        (30, "", (2, 15, 27)),
        (32, "0,7,32", (0, 7, 32)),
        (3, "", (0, 1, 2)),
        (1, "", (0, 0, 1)),
    ],
)
def test_the_layers_that_are_read(n_layers, given, expected):
    drafter = make_drafter(Eagle3Config(tap_layers=given), tiny_arch(n_layers=n_layers))
    assert drafter.taps == expected == drafter.loss_view(3).taps


@cache
def problem(fields=(), draft_vocab=0):
    """The backbone as heads see it, with all tokens or those of IDS, the drafter, its weights."""
    heads = Eagle3Config(n_heads=4, draft_vocab=draft_vocab, **dict(fields))
    backbone = stored_base()
    if draft_vocab:
        backbone = vocabulary.narrowed(backbone, jnp.asarray(IDS))
    drafter, params = drafter_of(heads, backbone)
    return backbone, drafter, params


def of(fields, draft_vocab=0):
    return problem(tuple(fields.items()), draft_vocab)


def numpy_reader(params, drafter, backbone, hidden_TE, tokens_T):
    """path -> what a level gives after it: tokens drafted after the text, the root first.

    For each path the whole text and the levels before are run again, in one causal sequence.
    """
    mine, heads, known = params["heads_0"], drafter.heads, {}
    embedding = np.asarray(backbone.params["embed_tokens"]["embedding"])
    streams = np.split(hidden_TE[:, D:], len(drafter.taps), axis=1)
    if heads.fc_norm:
        streams = [
            numpy_norm(mine[f"fc_norms_{a}"]["scale"], x) for a, x in enumerate(streams)
        ]
    g_TD = np.concatenate(streams, -1) @ mine["fc"]["kernel"]

    def out(path):
        path = tuple(path)
        if path not in known:
            deeper = [out(path[:d])[None] for d in range(1, len(path))]
            x = np.concatenate([g_TD, *deeper])
            e = embedding[[*tokens_T[1:], *path]]
            layer = mine["layers_0"]
            normed = numpy_norm(layer["hidden_norm"]["scale"], x)
            read = np.concatenate(
                [numpy_norm(layer["input_layernorm"]["scale"], e), normed], -1
            )
            config = backbone.llama.config
            x = numpy_layer(
                layer, config, normed if heads.norm_before_residual else x, read
            )
            for j in range(1, heads.n_layers):
                x = numpy_layer(mine[f"layers_{j}"], config, x)
            known[path] = (
                numpy_norm(mine["norm"]["scale"], x[-1]) if heads.norm_output else x[-1]
            )
        return known[path]

    def logits(path):
        x = out(path)
        if not heads.norm_output:
            x = numpy_norm(mine["norm"]["scale"], x)
        return numpy_lm_head(mine, backbone, x)

    return out, logits


@pytest.mark.parametrize("fields", [PAPER, NEWER, VARIANT])
def test_features_and_logits_of_every_level(fields, monkeypatch):
    """In training, over several blocks of keys."""
    monkeypatch.setattr(causal, "BLOCK", 5)
    backbone, drafter, params = of(fields)
    rng = np.random.default_rng(0)
    rows = hidden, tokens, *_ = family.random_rows(rng, B=1, E=family.width(drafter))
    features, logits = family.features_and_logits(drafter, params, backbone, rows)
    for t in (0, 4, 7):
        out, scores = numpy_reader(
            params, drafter, backbone, hidden[0, : t + 1], tokens[0, : t + 1]
        )
        for k in range(4):
            path = tokens[0, t + 1 : t + k + 2]
            assert_close(features[k, 0, t], out(path))
            assert_close(logits[k][0, t], scores(path))


@pytest.mark.parametrize("tree", [Tree.chain(4), WILD])
@pytest.mark.parametrize("fields", [PAPER, NEWER])
def test_drafts_of_a_chain_and_of_a_tree(fields, tree):
    """Tokens and logits of every node that has children, over the draft vocabulary."""
    backbone, drafter, params = of(fields, len(IDS))
    rng = np.random.default_rng(5)
    rows = hidden, tokens, *_ = family.random_rows(rng, E=family.width(drafter))
    n = [3, 12]
    root = tokens[[0, 1], [3, 0]]  # what `committed` says comes after the last position
    state = family.committed(drafter, backbone, params, rows, n)
    propose = family.proposed_logits(drafter, backbone, tree)
    nodes, logits = jax.tree.map(np.asarray, propose(params, state, root))
    for b in range(2):
        _, scores = numpy_reader(
            params, drafter, backbone, hidden[b, : n[b]], tokens[b, : n[b]]
        )

        def of_all(path, scores=scores):
            """Logits of all tokens; those outside are never drafted."""
            every = np.full(family.V, -np.inf)
            every[IDS] = scores(path)
            return every

        assert nodes[b].tolist() == numpy_tree(tree, of_all, root[b])
        for depth, inner in enumerate(inner_nodes(Level.of(tree), tree)):
            paths = [tree.ancestors_ML[node, : depth + 1] for node in inner]
            want = np.stack([scores(nodes[b][path].tolist()) for path in paths])
            assert_close(logits[depth][b], want)


@pytest.mark.parametrize("fields", [PAPER, NEWER])
def test_the_loss_of_every_level_and_its_gradient_through_them(fields, monkeypatch):
    """Of each level: the sum of -p log q over pairs that count, p the backbone's over IDS, over all
    pairs, those with another label included."""
    monkeypatch.setattr(causal, "BLOCK", 4)
    whole, (backbone, drafter, params) = stored_base(), of(fields, len(IDS))
    kernel = np.asarray(whole.params["lm_head"]["kernel"])[:, IDS]

    def numpy_loss(params, rows, counted):
        sums, pairs, outside = np.zeros(3), np.zeros(3), 0
        for k, t, h, ids in family.level_pairs(rows, counted, 3):
            pairs[k] += 1
            if ids[t + k + 2] not in IDS:
                outside += 1
                continue
            scores = numpy_reader(params, drafter, backbone, h[: t + 1], ids[: t + 1])[1]
            q = scores(ids[t + 1 : t + k + 2])
            teacher = h[t + k + 1, :D] @ kernel
            p = np.exp(teacher - teacher.max())
            log_q = q - q.max() - np.log(np.exp(q - q.max()).sum())
            sums[k] -= p @ log_q / p.sum()
        assert outside and sums.any()
        return 0.8 ** np.arange(1, 4) @ (sums / pairs)

    targets = losses.HeadTargets(label_weight=0.0, teacher_weight=1.0)
    family.check_levels_loss(drafter, params, backbone, targets, numpy_loss, 3, 0.8)
