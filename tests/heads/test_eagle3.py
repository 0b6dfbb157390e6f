"""EAGLE-3 against numpy: streams fused, levels fed back, drafts of a tree, the loss of every level."""

import itertools
from functools import cache

import family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from family import D, drafter_of, numpy_lm_head, stored_base
from numpy_layers import numpy_layer, numpy_norm
from test_hydra import numpy_tree, parameters
from tiny import tiny_arch
from trees import WILD

from medusa_jax.config import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import make_drafter, vocabulary
from medusa_jax.heads.drafter import TextRows
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.heads.levels import Level, inner_nodes
from medusa_jax.model import causal
from medusa_jax.training import losses
from medusa_jax.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
IDS = np.array([0, 1, 3, 4, 6, 9, 10, 15, 17, 21, 22], np.int32)
LLAMA_8B = LlamaConfig(128256, 4096, 32, 32, 8, 128, 14336)

# The paper's; 3.1; variants of published files, over a draft vocabulary.
PAPER, NEWER = {}, {"fc_norm": True, "norm_output": True}
VARIANT = {"n_layers": 2, "norm_before_residual": True, "tap_layers": "1,2"}


def test_the_size_for_llama_8b():
    """The published file, with an LM head of 32,000 tokens, has 849 MB in 16 bits."""
    n = parameters(Eagle3Config(n_heads=7, draft_vocab=32000), LLAMA_8B)
    assert n - 4096 * (128256 - 32000) == 424_689_664
    for depth in (1, 7):
        assert parameters(Eagle3Config(n_heads=depth), LLAMA_8B) == n


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


@pytest.mark.parametrize("given", ["1,2,3", "-1", "1,,2", "low"])
def test_layers_that_do_not_exist_are_refused(given):
    with pytest.raises(UserError, match=r"heads\.tap_layers are numbers from 0 to 2"):
        make_drafter(Eagle3Config(tap_layers=given), tiny_arch())


@pytest.mark.parametrize("sizes", [{"kv_heads": 3}, {"head_dim": 5}, {"d_ff": -1}])
def test_sizes_of_layers_that_do_not_fit_are_refused(sizes):
    with pytest.raises(
        UserError, match=r"heads\.attention_heads 4, .* do not fit together"
    ):
        make_drafter(Eagle3Config(**sizes), tiny_arch())


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

    @jax.jit
    def both(params):
        features = drafter.features(params, backbone, TextRows(*rows))
        return features, [
            drafter.head_logits(params, backbone, k, features[k]) for k in range(4)
        ]

    features, logits = both(params)
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


def numpy_loss(params, drafter, backbone, whole, rows, counted, levels):
    """Of each level: the sum of -p log q over pairs that count, p the backbone's over IDS, over all
    pairs, those with another label included."""
    hidden, tokens, _, segments = rows
    kernel = np.asarray(whole.params["lm_head"]["kernel"])[:, IDS]
    sums, pairs = np.zeros(levels), np.zeros(levels)
    for segment in np.unique(segments):
        here = segments[0] == segment
        h, ids, counts = hidden[0][here], tokens[0][here], counted[0][here]
        for t, k in itertools.product(range(len(ids)), range(levels)):
            if t + k + 2 >= len(ids) or not counts[t + 1 : t + k + 3].all():
                continue
            pairs[k] += 1
            if ids[t + k + 2] not in IDS:
                continue
            scores = numpy_reader(params, drafter, backbone, h[: t + 1], ids[: t + 1])[1]
            q = scores(ids[t + 1 : t + k + 2])
            teacher = h[t + k + 1, :D] @ kernel
            p = np.exp(teacher - teacher.max())
            log_q = q - q.max() - np.log(np.exp(q - q.max()).sum())
            sums[k] -= p @ log_q / p.sum()
    return sums / pairs


@pytest.mark.parametrize("fields", [PAPER, NEWER])
def test_the_loss_of_every_level_and_its_gradient_through_them(fields, monkeypatch):
    """Two texts in a row, a token in between that does not count, labels outside the vocabulary."""
    monkeypatch.setattr(causal, "BLOCK", 4)
    whole, (backbone, drafter, params) = stored_base(), of(fields, len(IDS))
    levels, decay = 3, 0.8
    rng = np.random.default_rng(3)
    hidden, tokens, _, segments = family.random_rows(rng, 1, 11, family.width(drafter))
    segments[0, 7:] = 2
    positions = np.array([[*range(7), *range(4)]], np.int32)
    counted = np.ones((1, 11), bool)
    counted[0, 2] = False
    assert 0 < np.isin(tokens, IDS).sum() < tokens.size
    rows = (hidden, tokens, positions, segments)
    batch = dict(zip(("hidden", "tokens", "positions", "segment_ids"), rows))
    batch["counted"] = counted
    targets = losses.HeadTargets(label_weight=0.0, teacher_weight=1.0)
    objective = losses.HeadObjective(drafter.loss_view(levels), 4, decay, targets)
    offsets = tuple(range(2, levels + 2))
    counts = losses.pair_counts(batch, offsets)

    @jax.jit
    def value_and_gradient(params):
        def loss(params):
            inputs = losses.StepInputs(batch, counts)
            return losses.head_loss(params, backbone, objective, inputs)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (value, sums), gradient = value_and_gradient(params)
    given = (whole, rows, counted, levels)
    of_levels = numpy_loss(params, drafter, backbone, *given)
    assert_close(np.asarray(sums.loss) / np.asarray(counts), of_levels, dtype="float32")
    weights = decay ** np.arange(1, levels + 1)
    assert_close(value, weights @ of_levels)
    away = jax.tree.map(lambda x: rng.standard_normal(x.shape), params)
    step = 1e-6

    def moved(by):
        there = jax.tree.map(lambda x, y: np.asarray(x) + by * y, params, away)
        return weights @ numpy_loss(there, drafter, backbone, *given)

    slope = (moved(step) - moved(-step)) / (2 * step)
    product = jax.tree.map(lambda x, y: (np.asarray(x) * y).sum(), gradient, away)
    assert sum(jax.tree.leaves(product)) == pytest.approx(slope, rel=1e-6)


def test_every_level_starts_as_the_last_stream():
    """Which the backbone's norm and LM head then read."""
    backbone, drafter, _ = of(PAPER)
    rows = hidden, *_ = family.random_rows(
        np.random.default_rng(0), E=family.width(drafter)
    )
    start = family.start_of(drafter, backbone)
    run = jax.jit(lambda p: drafter.features(p, backbone, TextRows(*rows)))
    for k, features in enumerate(run(start)):
        assert_close(features, hidden[..., -D:], dtype="float32")
        logits = drafter.head_logits(start, backbone, k, features)
        read = numpy_norm(backbone.params["norm"]["scale"], hidden[..., -D:])
        assert_close(logits, backbone.lm_head(jnp.asarray(read)), dtype="float32")
