"""EAGLE-1 and EAGLE-3 against numpy: EAGLE-3's streams fused, levels fed back to each other, drafts of a
tree, the loss of every level."""

from dataclasses import replace

import family
import jax
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from family import IDS, D, numpy_lm_head, problem, stored_base
from numpy_layers import numpy_layer, numpy_norm, queries_keys_values, weight_of
from scipy.special import log_softmax, softmax
from test_hydra import numpy_tree
from tiny import tiny_arch
from trees import WILD

from medusa_jax.config import HeadsConfig, TrainConfig
from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import TextRows
from medusa_jax.heads.eagle import EagleConfig
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.heads.fill import Level
from medusa_jax.heads.optional import loss_view
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model import running_softmax
from medusa_jax.training.losses import induction
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")

EAGLE = EagleConfig(n_heads=4, n_layers=2, lm_head="shared", rank=5)
SHALLOW = replace(EAGLE, n_layers=1)
LOW_RANK = replace(SHALLOW, lm_head="low_rank", fc_bias=False)
# The paper's; 3.1; variants of published files.
PAPER = Eagle3Config(n_heads=4)
NEWER = replace(PAPER, fc_norm=True, norm_output=True)
VARIANT = replace(PAPER, n_layers=2, norm_before_residual=True, tap_layers="1,2")
# Over a draft vocabulary.
FEW, NEWER_FEW = (replace(heads, draft_vocab=len(IDS)) for heads in (PAPER, NEWER))


def name_of(heads):
    """Of a test's case: the fields that are not the defaults."""
    fields = {n: x for n, x in vars(heads).items() if x != getattr(type(heads)(), n)}
    return " ".join([heads.drafter, *(f"{n}={x}" for n, x in fields.items())])


def numpy_reader(params, drafter, backbone, hidden_TE, tokens_T):
    """What a level gives after a path, tokens drafted after the text, the root first; and its logits.

    For each path the whole text and the levels before are run again, in one causal sequence.
    """
    mine, heads, known = params["heads_0"], drafter.heads, {}
    layer, config, third = mine["layers_0"], backbone.llama.config, drafter.taps
    embedding = np.asarray(backbone.params["embed_tokens"]["embedding"])
    rms = lambda part, x: numpy_norm(part["scale"], x)  # noqa: E731
    text_TD = hidden_TE
    if third:
        streams = np.split(hidden_TE[:, D:], len(drafter.taps), axis=1)
        if heads.fc_norm:
            streams = [rms(mine[f"fc_norms_{a}"], x) for a, x in enumerate(streams)]
        text_TD = np.concatenate(streams, -1) @ mine["fc"]["kernel"]

    def first_layer(following, x):
        if not third:
            x = np.concatenate([following, x], -1) @ mine["fc"]["kernel"]
            return numpy_layer(layer, config, x + mine["fc"].get("bias", 0))
        normed = rms(layer["hidden_norm"], x)
        read = np.concatenate([rms(layer["input_layernorm"], following), normed], -1)
        x = normed if heads.norm_before_residual else x
        return numpy_layer(layer, config, x, read)

    def out(path):
        path = tuple(path)
        if path not in known:
            deeper = [out(path[:d])[None] for d in range(1, len(path))]
            following = embedding[[*tokens_T[1:], *path]]
            x = first_layer(following, np.concatenate([text_TD, *deeper]))
            for j in range(1, heads.n_layers):
                x = numpy_layer(mine[f"layers_{j}"], config, x)
            normed = third and heads.norm_output
            known[path] = rms(mine["norm"], x[-1]) if normed else x[-1]
        return known[path]

    def logits(path):
        x = out(path)
        if third and not heads.norm_output:
            x = rms(mine["norm"], x)
        return numpy_lm_head(mine, backbone, x)

    return out, logits


@pytest.mark.parametrize(
    "heads", [*wide(SHALLOW, EAGLE, PAPER, VARIANT), LOW_RANK, NEWER], ids=name_of
)
def test_features_and_logits_of_every_level(heads, monkeypatch):
    """Those of the paper; in training, over several blocks of keys."""
    monkeypatch.setattr(running_softmax, "BLOCK", 5)
    backbone, drafter, params = problem(heads)
    assert ("bias" in params["heads_0"]["fc"]) == getattr(heads, "fc_bias", False)
    rng = np.random.default_rng(0)
    rows = hidden, tokens, *_ = family.random_rows(rng, B=1, E=family.width(drafter))
    features, logits = family.features_and_logits(drafter, params, backbone, rows)
    for t in (0, 3, 4, 7):
        text = hidden[0, : t + 1], tokens[0, : t + 1]
        out, scores = numpy_reader(params, drafter, backbone, *text)
        for k in range(4):
            path = tokens[0, t + 1 : t + k + 2]
            assert_close(features[k, 0, t], out(path))
            assert_close(logits[k][0, t], scores(path))


@pytest.mark.parametrize(
    ("heads", "tree"),
    [(EAGLE, WILD), (NEWER_FEW, WILD)]
    + wide((FEW, Tree.chain(4)), (FEW, WILD), (NEWER_FEW, Tree.chain(4))),
)
def test_drafts_of_a_chain_and_of_a_tree(heads, tree):
    """Features of the root, tokens and logits of every node that has children, each after its path."""
    backbone, drafter, params = problem(heads)
    ids = IDS if heads.draft_vocab else np.arange(family.V)
    rng = np.random.default_rng(5)
    rows = hidden, tokens, *_ = family.random_rows(rng, E=family.width(drafter))
    n = [3, 12]
    root = tokens[[0, 1], [3, 0]]  # what `committed` says comes after the last position
    state = family.committed(drafter, backbone, params, rows, n)
    propose = family.proposed_logits(drafter, backbone, tree)
    nodes, logits, state = jax.tree.map(np.asarray, (*propose(params, state, root), state))
    for b in range(2):
        text = hidden[b, : n[b]], tokens[b, : n[b]]
        out, scores = numpy_reader(params, drafter, backbone, *text)
        assert_close(state.context_BSD[b, 0], out([root[b]]))

        def of_all(path, scores=scores):
            """Logits of all tokens; those outside are never drafted."""
            every = np.full(family.V, -np.inf)
            every[ids] = scores(path)
            return every

        assert nodes[b].tolist() == numpy_tree(tree, of_all, root[b])
        for depth, level in enumerate(Level.of(tree)):
            inner = tree.level(depth)[level.nodes_P]
            paths = [tree.ancestors_ML[node, : depth + 1] for node in inner]
            want = np.stack([scores(nodes[b][path].tolist()) for path in paths])
            assert_close(logits[depth][b], want)


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
    assert drafter.taps == expected == loss_view(drafter, 3).taps


TARGETS = TrainConfig(label_weight=0.25, teacher_weight=0.5, feature_weight=3.0)


@pytest.mark.parametrize("levels", [1, *wide(3)])
def test_the_loss_over_levels_and_its_gradient_through_them(levels, monkeypatch):
    """sum_k decay^k (3 smooth L1 to the hidden state + CE / 4 with text + CE / 2 with the backbone),
    each level's mean over the pairs of that distance; each level reads the one above."""
    monkeypatch.setattr(running_softmax, "BLOCK", 4)
    backbone, drafter, params = problem(SHALLOW)
    kernel = backbone.params["lm_head"]["kernel"]

    def numpy_loss(params, rows, counted):
        terms = [[] for _ in range(levels)]
        for k, t, h, ids in family.level_pairs(rows, counted, levels):
            out, _ = numpy_reader(params, drafter, backbone, h[: t + 1], ids[: t + 1])
            x = out(ids[t + 1 : t + k + 2])
            logp, teacher = log_softmax(x @ kernel), softmax(h[t + k + 1] @ kernel)
            apart = np.abs(x - h[t + k + 1])
            smooth = np.where(apart < 1, 0.5 * apart**2, apart - 0.5).mean()
            soft = -(teacher * logp).sum()
            terms[k].append(3.0 * smooth - 0.25 * logp[ids[t + k + 2]] + 0.5 * soft)
        return sum(0.7 ** (k + 1) * np.mean(x) for k, x in enumerate(terms))

    family.check_levels_loss(drafter, params, backbone, TARGETS, numpy_loss, levels, 0.7)


@pytest.mark.wide
@pytest.mark.parametrize("heads", [NEWER_FEW, *wide(FEW)], ids=name_of)
def test_eagle3_s_loss_of_every_level_and_its_gradient(heads, monkeypatch):
    """Of each level: the sum of -p log q over pairs that count, p the backbone's over IDS, over all
    pairs, those with another label included."""
    monkeypatch.setattr(running_softmax, "BLOCK", 4)
    whole, (backbone, drafter, params) = stored_base(), problem(heads)
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
            sums[k] -= softmax(h[t + k + 1, :D] @ kernel) @ log_softmax(q)
        assert outside and sums.any()
        return 0.8 ** np.arange(1, 4) @ (sums / pairs)

    targets = TrainConfig(label_weight=0.0, teacher_weight=1.0)
    family.check_levels_loss(drafter, params, backbone, targets, numpy_loss, 3, 0.8)


@pytest.mark.parametrize("heads", wide(FEW, SHALLOW), ids=name_of)
def test_the_induction_loss_and_its_gradient(heads, monkeypatch):
    """-log of the share of attention, a mean over heads, that row t gives to the rows that read token t + 2,
    over all pairs of the first level; 0 without such a row or outside the draft vocabulary."""
    for module in (running_softmax, induction):
        monkeypatch.setattr(module, "BLOCK", 4)
    backbone, drafter, params = problem(heads)
    embedding = backbone.params["embed_tokens"]["embedding"]

    def first_pairs(rows, counted):
        pairs = family.level_pairs(rows, counted, 2)
        return [(t, h, ids) for k, t, h, ids in pairs if k == 0]

    def earlier(t, ids):
        right = ids[1 : t + 2] == ids[t + 2]
        return right & (not heads.draft_vocab or ids[t + 2] in IDS)

    def numpy_loss(params, rows, counted):
        mine, total = params["heads_0"], 0
        weight = weight_of(mine["layers_0"])
        pairs = first_pairs(rows, counted)
        for t, h, ids in pairs:
            e, f = embedding[ids[1 : t + 2]], h[: t + 1]
            if heads is FEW:
                f = numpy_norm(weight("hidden_norm"), f[:, D:] @ mine["fc"]["kernel"])
                read = np.concatenate([numpy_norm(weight("input_layernorm"), e), f], -1)
            else:
                read = np.concatenate([e, f], -1) @ mine["fc"]["kernel"]
                read = read + mine["fc"]["bias"]
            q, k, _ = queries_keys_values(backbone.llama.config, weight, read)
            score = np.einsum("nh,snh->ns", q[t], k) / np.sqrt(q.shape[-1])
            p = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
            right = earlier(t, ids)
            total -= np.log(p[:, right].sum(-1).mean()) if right.any() else 0
        # Some pairs have such a row, some have none, and some that have one do not count.
        every = first_pairs(rows, np.ones_like(counted))
        found, most = (sum(earlier(t, x).any() for t, _, x in p) for p in (pairs, every))
        assert 0 < found < min(len(pairs), most)
        return 0.7 * 3 * total / len(pairs)

    targets = TrainConfig(label_weight=0.0, induction_weight=3.0)
    family.check_levels_loss(drafter, params, backbone, targets, numpy_loss, 2, 0.7, 3)


@pytest.mark.wide
def test_levels_keep_no_scores_for_the_gradient():
    """Two more levels cost less memory than the scores of one."""
    B, T = 1, 1024
    backbone, drafter, params = problem(SHALLOW)
    shape = jax.ShapeDtypeStruct((B, T), np.int32)
    hidden = jax.ShapeDtypeStruct((B, T, family.D), np.float64)

    def held(levels):
        def loss(params, *rows):
            view = loss_view(drafter, levels)
            return view.features(params, backbone, TextRows(*rows)).sum()

        compiled = jax.jit(jax.grad(loss)).lower(params, hidden, *[shape] * 3).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = B * backbone.llama.config.n_heads * T * T * 8
    assert held(3) - held(1) < scores


def test_as_many_levels_as_trees_may_be_deep():
    _, drafter, _ = problem(EAGLE)
    assert loss_view(drafter, 4).n_heads == 4 and loss_view(drafter).n_heads == 1
    for levels in (0, 5):
        with pytest.raises(UserError, match=f"from 1 to heads.n_heads 4, not {levels}"):
            loss_view(drafter, levels)
    medusa = make_drafter(HeadsConfig(), drafter.llama)
    assert loss_view(medusa) is medusa
    with pytest.raises(UserError, match=r"train\.levels 2 .* all heads of medusa train"):
        loss_view(medusa, 2)
