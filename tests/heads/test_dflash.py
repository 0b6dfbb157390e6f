"""DFlash and DSpark against numpy: the guesses of a block after a text, and the files of their fields."""

from dataclasses import replace

import family
import jax
import numpy as np
import pytest
from cases import thinned, wide
from closeness import assert_close
from family import D, problem
from numpy_layers import numpy_norm, rope, silu
from scipy.special import softmax
from trees import WILD

from medusa_jax.config import HeadsConfig, TrainConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import dflash
from medusa_jax.heads.dflash import DFlashConfig, DSparkConfig
from medusa_jax.heads.drafter import TextRows
from medusa_jax.heads.registry import make_drafter
from medusa_jax.training.functions import HeadFunctions
from medusa_jax.training.losses.objectives import heads_loss
from medusa_jax.training.losses.pairs import StepInputs, draw_anchors, pair_counts

pytestmark = pytest.mark.usefixtures("x64")

DFLASH = DFlashConfig(n_heads=4, n_layers=2, mask_token=3, lm_head="low_rank", rank=5)
DSPARK = DSparkConfig(
    n_heads=4, tap_layers="0,2", kv_heads=1, d_ff=20, markov_rank=6, rope_theta=50.0
)
# Windows as speculators and SpecForge count them; a mixture of layers; another epsilon.
AT_ROOT = replace(DSPARK, sliding_layers="0,1", window=2, window_at_root=True)
AT_SLOT = replace(DFLASH, sliding_layers="1", window=3, rms_eps=0.1)
MIXED = replace(AT_ROOT, sliding_layers="0", causal="all", window=1)
FREE = replace(AT_SLOT, causal="none")
RANK_0 = replace(DSPARK, markov_rank=0)
KINDS = [DFLASH, DSPARK, AT_ROOT, AT_SLOT, MIXED, FREE, RANK_0]
NAMES = ["dflash", "dspark", "at the root", "at the slot", "mixed", "free", "rank 0"]


def numpy_block(drafter, params, backbone, hidden_TE, root):
    """Inputs of the LM head [K, D] for the guesses after a text and its root."""
    mine, c, h = params["heads_0"], drafter.shape, drafter.heads
    N, G, H, T = c.n_heads, c.n_kv_heads, c.head_dim, len(hidden_TE)
    eps = h.rms_eps or 1e-5

    def turned(x, weight, norm, first):
        """Normed and rotated heads of rows whose first is at position `first`."""
        y = (x @ weight["kernel"]).reshape(len(x), -1, H)
        y = numpy_norm(norm["scale"], y, eps)
        before = np.zeros((first, *y.shape[1:]))
        return rope(np.concatenate([before, y]), c.rope_theta)[first:]

    fused = hidden_TE[:, D:] @ mine["fc"]["kernel"]
    text = numpy_norm(mine["hidden_norm"]["scale"], fused, eps)
    n_slots = 4 if h.root_guesses else 5
    tokens = [root] + [h.mask_token % family.V] * (n_slots - 1)
    x = np.asarray(backbone.params["embed_tokens"]["embedding"])[tokens]
    # speculators' create_anchor_block_mask_mod: positions from root - window on, for every slot. SpecForge's
    # create_dflash_sdpa_mask: from root + slot - (window - 1) on; slots of causal layers see those up to themselves.
    slot, first = np.arange(n_slots)[:, None], T - h.window
    if not h.window_at_root:
        first = T + slot - (h.window - 1)
    for j in range(h.n_layers):
        seen = np.ones((n_slots, T + n_slots), bool)
        if str(j) in h.sliding_layers.split(","):
            seen[:, :T] = np.arange(T)[None] >= first
        sliding = str(j) in h.sliding_layers.split(",")
        if {"all": True, "sliding": sliding, "none": False}[h.causal]:
            seen[:, T:] = slot >= slot.T
        layer = mine[f"layers_{j}"]
        a, mlp = layer["self_attn"], layer["mlp"]
        read = numpy_norm(layer["input_layernorm"]["scale"], x, eps)
        q = turned(read, a["q_proj"], a["q_norm"], T)
        both = np.concatenate([text, read])
        k = turned(both, a["k_proj"], a["k_norm"], 0).repeat(N // G, 1)
        v = (both @ a["v_proj"]["kernel"]).reshape(len(both), G, H).repeat(N // G, 1)
        score = np.exp(np.einsum("qnh,snh->nqs", q, k) / np.sqrt(H)) * seen
        score /= score.sum(-1, keepdims=True)
        out = np.einsum("nqs,snh->qnh", score, v).reshape(n_slots, -1)
        x = x + out @ a["o_proj"]["kernel"]
        read = numpy_norm(layer["post_attention_layernorm"]["scale"], x, eps)
        gated = silu(read @ mlp["gate_proj"]["kernel"]) * (read @ mlp["up_proj"]["kernel"])
        x = x + gated @ mlp["down_proj"]["kernel"]
    return numpy_norm(mine["norm"]["scale"], x, eps)[-4:]


@pytest.mark.parametrize("heads", thinned(KINDS, DFLASH, DSPARK, MIXED), ids=NAMES)
def test_a_block_after_every_text(heads, monkeypatch):
    """In training, three blocks at a time; logits with the bias of the token before."""
    monkeypatch.setattr(dflash, "BLOCKS", 3)
    backbone, drafter, params = problem(heads)
    rng = np.random.default_rng(0)
    rows = hidden, tokens, *_ = family.random_rows(rng, B=1, T=10, E=family.width(drafter))
    features, logits = family.features_and_logits(drafter, params, backbone, rows)
    mine = params["heads_0"]
    for t in (0, 2, 3, 5):
        block = numpy_block(drafter, params, backbone, hidden[0, : t + 1], tokens[0, t + 1])
        for k, expected in enumerate(block):
            assert_close(features[k, 0, t, :D], expected)
            score = family.numpy_lm_head(mine, backbone, expected)
            if heads.markov_rank:
                before = mine["markov_w1"]["embedding"][tokens[0, t + k + 1]]
                score = score + before @ mine["markov_w2"]["kernel"]
            assert_close(logits[k][0, t], score)


@pytest.mark.parametrize("heads", [DSPARK, AT_ROOT, MIXED], ids=["full", "root", "mixed"])
def test_a_level_of_a_tree_is_ranked_after_its_parents(heads):
    """The slot's logits plus the bias of each parent."""
    backbone, drafter, params = problem(heads)
    rng, E = np.random.default_rng(1), family.width(drafter)
    rows = hidden, *_ = family.random_rows(rng, 1, 9, E)
    state, root = family.committed(drafter, backbone, params, rows, [7]), 5
    propose = family.proposed_logits(drafter, backbone, WILD)
    nodes = np.asarray(propose(params, state, np.array([root], np.int32))[0])[0]
    block = numpy_block(drafter, params, backbone, hidden[0, :7], root)
    mine = params["heads_0"]
    for node in range(1, WILD.n_nodes):
        depth, rank = WILD.depth_M[node], WILD.rank_M[node]
        before = mine["markov_w1"]["embedding"][nodes[WILD.parent_M[node]]]
        score = family.numpy_lm_head(mine, backbone, block[depth - 1])
        score = score + before @ mine["markov_w2"]["kernel"]
        assert nodes[node] == np.argsort(-score)[rank]


def test_layers_that_are_read():
    """The published formula; outputs of layers, which we number by their inputs."""
    llama = family.tiny_arch(n_layers=36)
    drafter = make_drafter(DFlashConfig(), llama)
    assert drafter.taps == (2, 10, 18, 26, 34)  # target_layer_ids 1, 9, 17, 25, 33


def test_the_text_of_a_block_is_not_written():
    """`propose` leaves the state as it is, so a block may be longer than the room after the text."""
    backbone, drafter, params = problem(DFLASH)
    rows = family.random_rows(np.random.default_rng(2), 1, 9, family.width(drafter))
    state = family.committed(drafter, backbone, params, rows, [9])
    full = jax.tree.map(lambda x: x[:, :, :9] if np.ndim(x) == 4 else x, state)
    propose = family.proposed_logits(drafter, backbone, WILD)
    root = np.array([5], np.int32)
    logits = [propose(params, s, root)[1] for s in (state, full)]
    jax.tree.map(assert_close, *logits)


@pytest.mark.wide
@pytest.mark.parametrize("through", [False, *wide(True)])
def test_the_loss_at_drawn_anchors(through):
    """0.1 CE + 0.9 L1 + BCE of the confidence with 1 - L1 / 2 + 0.2 smooth L1 of the features, in NumPy; only the
    head of the confidence learns it, or as in DeepSpec block and Markov head too."""
    backbone, drafter, params = problem(replace(DSPARK, confidence=True))
    rng = np.random.default_rng(3)
    T, E = 11, family.width(drafter)
    hidden, tokens, positions, segments = family.random_rows(rng, B=2, T=T, E=E)
    batch = {
        "tokens": tokens, "positions": positions, "segment_ids": segments,
        "counted": np.arange(T)[None] >= np.array([[3], [7]]),
    }  # fmt: skip
    batch["anchors"] = np.asarray(draw_anchors(jax.random.key(0), batch, 4))
    # Positions whose next two tokens count; the second row has three, also the one before its answer.
    first, second = map(set, batch["anchors"])
    assert len(first) == 4 and first <= set(range(2, 9)) and set(range(6, 9)) <= second

    def loss(params, weight, through=False):
        train = TrainConfig(
            label_weight=0.1, distance_weight=0.9, confidence_weight=weight, lambda_decay=0.7,
            loss_chunk=3, feature_weight=0.2, confidence_gradient=through,
        )  # fmt: skip
        inputs = StepInputs(batch, pair_counts(batch, (2, 3, 4, 5)))
        return heads_loss(drafter, params, backbone, hidden, train, inputs)[0]

    mine, total = jax.tree.map(np.asarray, params["heads_0"]), np.zeros((4, 2))
    targets = []  # head, row, position, share of accepted drafts
    for b, t in ((i, t) for i in range(2) for t in batch["anchors"][i]):
        block = numpy_block(drafter, params, backbone, hidden[b, : t + 1], tokens[b, t + 1])
        for k in range(4):
            if t + k + 2 >= T or not batch["counted"][b, t + 1 : t + k + 3].all():
                continue
            before = mine["markov_w1"]["embedding"][tokens[b, t + k + 1]]
            score = family.numpy_lm_head(mine, backbone, block[k])
            q = softmax(score + before @ mine["markov_w2"]["kernel"])
            p = softmax(np.asarray(backbone.lm_head(hidden[b, t + k + 1, :D])))
            both = np.concatenate([block[k], before])
            say = (both @ mine["confidence"]["kernel"])[0] + mine["confidence"]["bias"][0]
            apart = np.abs(p - q).sum()
            right = 1 - apart / 2
            targets.append((k, b, t, right))
            wrong = right * np.log(1 + np.exp(-say)) + (1 - right) * np.log(1 + np.exp(say))
            off = np.abs(block[k] - hidden[b, t + k + 1, :D])
            near = np.where(off < 1, off**2 / 2, off - 0.5).mean()
            of_text = -0.1 * np.log(q[tokens[b, t + k + 2]])
            total[k] += of_text + 0.9 * apart + wrong + 0.2 * near, 1

    def bce(params):
        """The confidence's term, of the features of whole rows."""
        text = TextRows(hidden, tokens, positions, segments)
        features, parts = drafter.features(params, backbone, text), []
        for k, b, t, right in targets:
            say = (
                features[k, b, t] @ mine["confidence"]["kernel"][:, 0]
                + mine["confidence"]["bias"][0]
            )
            off = right * jax.nn.softplus(-say) + (1 - right) * jax.nn.softplus(say)
            parts.append(0.7 ** (k + 1) / total[k, 1] * off)
        return sum(parts)

    expected = sum(0.7 ** (k + 1) * total[k, 0] / total[k, 1] for k in range(4))
    both = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    value, gradient = both(params, 1.0, through)
    assert_close(value, expected)
    _, without = both(params, 0.0)
    learnt = gradient["heads_0"].pop("confidence")
    assert np.abs(learnt["kernel"]).max() > 0
    assert np.abs(without["heads_0"].pop("confidence")["kernel"]).max() == 0
    if not through:
        jax.tree.map(assert_close, gradient, without)
        return
    # What W1 and the block learn is the slope of the BCE, whose target is fixed.
    more = jax.tree.map(np.subtract, gradient["heads_0"], without["heads_0"])
    wanted = jax.jit(jax.grad(bce))(params)["heads_0"]
    for name in ("fc", "hidden_norm", "layers_0", "layers_1", "norm", "markov_w1"):
        assert max(np.abs(x).max() for x in jax.tree.leaves(more[name])) > 0
        jax.tree.map(assert_close, more[name], wanted[name])


@pytest.mark.parametrize(
    ("heads", "fields", "message"),
    [
        (HeadsConfig(), {"anchors": 3}, "for dflash and dspark, not medusa"),
        (DSPARK, {"confidence_weight": 1.0}, "need each other"),
    ],
)
def test_losses_that_heads_do_not_have(heads, fields, message):
    with pytest.raises(UserError, match=message):
        HeadFunctions(heads, family.tiny_arch(), TrainConfig(**fields))
