"""What the tests of all drafters share: a tiny backbone, drafters with random weights.

In float64 (tests that use it are marked `x64`), so that a mistake stands out from what rounding does.
"""

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from closeness import assert_close
from tiny import decoder, random_heads, random_params, tiny_arch

from medusa_jax.config import HeadsConfig
from medusa_jax.heads import vocabulary
from medusa_jax.heads.drafter import Committed, DraftRequest, Ranked, TextRows
from medusa_jax.heads.optional import loss_view
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.training.losses.objectives import heads_loss
from medusa_jax.training.losses.pairs import StepInputs, pair_counts

D, V = 16, 23
# A draft vocabulary.
IDS = np.array([0, 1, 3, 4, 6, 9, 10, 15, 17, 21, 22], np.int32)


@cache
def stored_base(**fields):
    """A backbone with stored (unfused) parameters; V = 23, D = 16, two layers."""
    config = tiny_arch(**fields)
    return Backbone(Llama(config, jnp.float64), random_params(config, 0))


def small_heads(drafter, **fields):
    """Four heads of two layers, whatever the drafter's own defaults."""
    small = {"n_heads": 4, "n_layers": 2, "rank": 5}
    return HeadsConfig(drafter=drafter, **small | fields)


def drafter_of(heads, backbone, seed=0):
    """A drafter, and parameters in which every part matters."""
    drafter = make_drafter(heads, backbone.llama.config)
    return drafter, random_heads(drafter, backbone, seed)


@cache
def problem(heads):
    """The backbone as heads see it, scoring all tokens or only IDS; the drafter and its parameters."""
    backbone = stored_base()
    if heads.draft_vocab:
        backbone = vocabulary.narrowed(backbone, jnp.asarray(IDS))
    return backbone, *drafter_of(heads, backbone)


# Sizes at which baselines, which have no heads, show everything they do.
SMALL = {"prompt_lookup": {"tokens": 4}, "draft_model": {"gamma": 3}}


def baseline_of(name, config, seed=0):
    """A baseline and its parameters; the draft model is a random one of one layer, eight wide, and lacks a token."""
    fields, params = dict(SMALL.get(name, {})), {}
    if name == "draft_model":
        arch = dataclasses.replace(config, d_model=8, n_layers=1, d_ff=12)
        fields["arch"] = arch = dataclasses.replace(arch, vocab_size=config.vocab_size - 1)
        params = {"model": decoder(arch, random_params(arch, seed))[1]}
    heads = drafter_class(name).Config(**fields | {"drafter": name})
    return make_drafter(heads, config), params


def start_of(drafter, backbone):
    """Parameters of a drafter before its training."""
    return jax.jit(drafter.init)(jax.random.key(0), backbone)


def width(drafter):
    """E, the width of the hidden states that a drafter is given, with those of its taps."""
    return D * (1 + len(drafter.taps))


def random_rows(rng, B=2, T=12, E=D):
    """Hidden states [B, T, E] and token ids, positions and segments [B, T] of B texts."""
    hidden = rng.standard_normal((B, T, E))
    tokens = rng.integers(0, V, (B, T), np.int32)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32)[None], (B, T))
    return hidden, tokens, positions, np.ones((B, T), np.int32)


def features_and_logits(drafter, params, backbone, rows):
    """What training computes of these rows: features [K, B, T, D], and every head's logits."""

    @jax.jit
    def run(params):
        features = drafter.features(params, backbone, TextRows(*rows))
        heads = enumerate(features)
        return features, [drafter.head_logits(params, backbone, k, x) for k, x in heads]

    return run(params)


def numpy_lm_head(head, backbone, x):
    """Logits of a head on [..., D], whatever its kind."""
    if "lm_head" not in head:
        return x @ backbone.params["lm_head"]["kernel"]
    own = head["lm_head"]
    kernel = own["kernel"] if "kernel" in own else own["down"] @ own["up"]
    return x @ kernel + own.get("bias", 0)


def parameters(heads, llama):
    """Number of parameters of the heads, from shapes alone; a backbone of one layer is enough."""
    drafter = make_drafter(heads, llama)
    one = dataclasses.replace(llama, n_layers=1)

    def init(key):
        backbone = Backbone(Llama(one), init_params(one, key))
        return drafter.init(key, vocabulary.stand_in(backbone, heads))

    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0))))


def level_pairs(rows, counted, levels):
    """Every pair that counts: its level k, its position t, hidden states and tokens of its text."""
    hidden, tokens, _, segments = rows
    for segment in np.unique(segments):
        here = segments[0] == segment
        h, ids, counts = hidden[0][here], tokens[0][here], counted[0][here]
        for t, k in itertools.product(range(len(ids)), range(levels)):
            if t + k + 2 < len(ids) and counts[t + 1 : t + k + 3].all():
                yield k, t, h, ids


def check_levels_loss(drafter, params, backbone, train, numpy_loss, levels, decay, kinds=V):
    """The loss over levels is `numpy_loss(params, rows, counted)`, and its gradient that slope.

    Two texts in a row, blocks of keys, one token in between that does not count; tokens below `kinds`.
    """
    rng = np.random.default_rng(3)
    hidden, tokens, _, segments = random_rows(rng, 1, 11, width(drafter))
    tokens %= kinds
    segments[0, 7:] = 2
    positions = np.array([[*range(7), *range(4)]], np.int32)
    counted = np.ones((1, 11), bool)
    counted[0, 2] = False
    rows = (2 * hidden, tokens, positions, segments)
    batch = dict(zip(("hidden", "tokens", "positions", "segment_ids"), rows))
    batch["counted"] = counted
    train = dataclasses.replace(train, loss_chunk=4, lambda_decay=decay)
    view = loss_view(drafter, levels)
    counts = pair_counts(batch, tuple(range(2, levels + 2)))

    @jax.jit
    def value_and_gradient(params):
        def loss(params):
            inputs = StepInputs(batch, counts)
            hidden_BTE = jnp.asarray(batch["hidden"])
            return heads_loss(view, params, backbone, hidden_BTE, train, inputs)[0]

        return jax.value_and_grad(loss)(params)

    value, gradient = value_and_gradient(params)
    assert_close(value, numpy_loss(params, rows, counted))
    away, step = jax.tree.map(lambda x: rng.standard_normal(x.shape), params), 1e-6

    def moved(by):
        there = jax.tree.map(lambda x, y: np.asarray(x) + by * y, params, away)
        return numpy_loss(there, rows, counted)

    slope = (moved(step) - moved(-step)) / (2 * step)
    product = jax.tree.map(lambda x, y: (np.asarray(x) * y).sum(), gradient, away)
    assert_close(sum(jax.tree.leaves(product)), slope, 4e9)  # a difference quotient


def proposed_logits(drafter, backbone, tree):
    """(params, state, root_B, follow_BK) -> node tokens and the logits of every depth.

    With `follow_BK` the tokens of a chain are forced: depth d holds follow[:, d - 1].
    """

    def run(params, state, root_B, follow_BK=None):
        def rank(depth, logits):
            if follow_BK is None:  # as greedy decoding without penalties does
                return Ranked(logits, logits)
            wanted = jax.nn.one_hot(follow_BK[:, depth - 1], logits.shape[-1]) * 1e6
            wanted = wanted if logits.ndim == 2 else wanted[:, None, :]
            return Ranked(logits, logits + wanted)

        request = DraftRequest(root_B, tree, rank)
        nodes, ranked = drafter.propose(params, backbone, state, request)
        return nodes, [depth.logits for depth in ranked]

    return jax.jit(run)


def committed(drafter, backbone, params, rows, n_B):
    """The state after the first n positions of each row, read with one call."""
    hidden, tokens, positions, _ = rows
    state = drafter.start(hidden.shape[0], 64, jnp.float64)
    following = np.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
    commit = jax.jit(lambda *args: drafter.commit(params, backbone, *args))
    new = Committed(hidden, tokens, following, positions, np.asarray(n_B, np.int32))
    return commit(state, new)
