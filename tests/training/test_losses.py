"""Which pairs count, and that the streamed loss is the plain one, gradients included."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from tiny import random_heads, random_params
from training_setup import packed_batch, training_arch

from medusa_jax.config import HeadsConfig, LoraConfig, TrainConfig
from medusa_jax.heads import vocabulary
from medusa_jax.heads.drafter import TextRows, shift_left
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.training.losses import pairs
from medusa_jax.training.losses.lm_heads import HeadArrays, HeadReads
from medusa_jax.training.losses.objectives import heads_loss
from medusa_jax.training.losses.packing import LossColumns, RowSplit
from medusa_jax.training.losses.streamed import LossPlan, streamed_loss
from medusa_jax.training.partition import trained_groups
from medusa_jax.training.stage import make_stage

U, A = 0, 1


def mask_of(counted, segments, ahead):
    pair_mask = jax.jit(pairs.pair_mask, static_argnums=2)
    mask = pair_mask(np.array([counted], bool), np.array([segments]), ahead)
    return np.asarray(mask)[0].astype(int).tolist()


def test_which_pairs_count():
    counted = [U, U, A, A, A, A, U, A, A, U]
    segments = [1, 1, 1, 1, 1, 1, 2, 2, 2, 0]
    assert mask_of(counted, segments, 1) == [0, 1, 1, 1, 1, 0, 1, 1, 0, 0]
    assert mask_of(counted, segments, 2) == [0, 1, 1, 1, 0, 0, 1, 0, 0, 0]
    assert mask_of(counted, segments, 4) == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert mask_of(counted, segments, 6) == [0] * 10
    # The user's token between, padding, the end of a row.
    assert mask_of([A, A, U, A, A], [1] * 5, 2) == [0, 0, 1, 0, 0]
    assert mask_of([A, A, A, U, A], [1] * 5, 3) == [0, 0, 0, 0, 0]
    assert mask_of([A] * 4, [0] * 4, 1) == [0] * 4
    assert mask_of([A] * 3, [1] * 3, 3) == [0] * 3


def test_anchors_are_positions_whose_first_guess_has_a_label():
    """The position before an answer is one, the one before its end is none (`test_which_pairs_count`)."""
    batch = {
        "tokens": np.zeros((1, 10), int),
        "counted": np.array([[U, U, A, A, A, A, U, A, A, U]], bool),
        "segment_ids": np.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 0]]),
    }
    for seed in range(5):
        drawn = pairs.draw_anchors(jax.random.key(seed), batch, 4)
        assert drawn.tolist() == [[1, 2, 3, 6]]
    assert np.asarray(shift_left(jnp.arange(1, 4)[None], 5)).tolist() == [[0, 0, 0]]


def naive_sums(weight, features, labels, mask):
    logits = features @ weight
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    order = jnp.argsort(-logits, axis=-1)
    hit1 = (order[..., 0] == labels) & mask
    hit5 = jnp.any(order[..., :5] == labels[..., None], axis=-1) & mask
    return jnp.sum(nll * mask), hit1.sum(), hit5.sum()


def answers(*spans):
    """Which columns of each row count."""
    mask = np.zeros((len(spans), 13), bool)
    for row, (begin, end) in enumerate(spans):
        mask[row, begin:end] = True
    return mask


RANDOM = np.random.default_rng(1).random((2, 13)) < 0.7


@pytest.mark.parametrize(
    ("mask", "chunk"),
    [
        (RANDOM, 5),
        *wide(*((RANDOM, chunk) for chunk in (4, 13, 64))),
        *((answers(*spans), 4) for spans in ([(3, 9), (0, 2)], [(0, 13), (5, 5)])),
        (answers((4, 4), (4, 4)), 4),
    ],
)
def test_streamed_sums_and_gradients_equal_the_plain_ones(mask, chunk):
    """Prompts and padding cost nothing: as many chunks as the longest answer of a row has."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((2, 13, 8)).astype(np.float32)
    weight = rng.standard_normal((8, 32)).astype(np.float32)
    labels = rng.integers(0, 32, (2, 13), np.int32)
    params, seen = {"used": weight, "unused": np.ones(3, np.float32)}, []

    def streamed(params, features, watched):
        def logits(reads, x):
            if watched:
                jax.debug.callback(lambda rows: seen.append(rows.shape), x)
            return x @ reads.heads["used"], None

        arrays = HeadArrays({"heads"})
        head = arrays.add(logits, HeadReads({"used": params["used"]}, {}))
        columns = LossColumns((features,), labels, (jnp.asarray(mask),), None)
        one = jnp.ones((1,))
        plan = LossPlan([head], None, {"label": 1.0}, arrays.specs, RowSplit(None), chunk)
        loss, sums = streamed_loss(plan, arrays.arrays, one, columns)
        return 0.3 * loss, sums

    def plain(params, features):
        loss, *counts = naive_sums(params["used"], features, labels, mask)
        return 0.3 * loss, counts

    def both(loss):
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, features)

    (value, sums), grads = both(partial(streamed, watched=True))
    (expected, counts), expected_grads = both(plain)
    jax.effects_barrier()
    assert seen == [(2, chunk, 8)] * -(-int(mask.sum(1).max()) // chunk)
    assert_close((value, grads), (expected, expected_grads))
    assert (int(sums.top1[0]), int(sums.top5[0])) == tuple(int(c) for c in counts)
    # Without a gradient the same numbers come out.
    alone = jax.jit(partial(streamed, watched=False))(params, features)[0]
    assert_close(alone, value)


def heads_problem(K=3, T=12, B=2, lm_head="own"):
    arch = training_arch()
    llama = Llama(arch)
    stored = jax.tree.map(np.float32, random_params(arch, 1, scale=1.0))
    backbone = Backbone(llama, stored)
    heads = HeadsConfig(n_heads=K, lm_head=lm_head, rank=4)
    drafter = make_drafter(heads, arch)
    params = jax.tree.map(np.float32, random_heads(drafter, backbone, seed=2))
    rng = np.random.default_rng(0)
    batch = packed_batch(rng, [(8, T - 8)] * B, T, counted=0.8)
    return arch, backbone, drafter, params, batch


def head_loss(params, backbone, drafter, train, inputs):
    """Equation 1 on a frozen backbone."""
    hidden = jax.lax.stop_gradient(backbone.forward(*pairs.text_of(inputs.batch)))
    return heads_loss(drafter, params, backbone, hidden, train, inputs)


def pairs_of(batch, ahead):
    """Rows and positions t whose tokens t + 1 ... t + ahead all count, in the text of t."""
    found = []
    B, T = batch["tokens"].shape
    for b, t in np.ndindex(B, T - ahead):
        span = slice(t + 1, t + ahead + 1)
        same = batch["segment_ids"][b, span] == (batch["segment_ids"][b, t] or -1)
        if same.all() and batch["counted"][b, span].all():
            found.append((b, t))
    return np.array(found).T


def plain_loss(params, backbone, drafter, batch, train, ids, lambda_0=None, original=None):
    """Equations 1 and 2 with all logits at once, one gather a head.

    Labels and the teacher's distribution are over the tokens `ids`; a hidden state to come near is there for
    every pair.

    Returns: the loss, and the pairs right of each head.
    """
    rows, tokens = pairs.text_of(batch), batch["tokens"]
    hidden = backbone.forward(*rows)
    features = drafter.features(params, backbone, TextRows(hidden, *rows))
    teacher = jax.lax.stop_gradient(jax.nn.softmax(backbone.lm_head(hidden)[..., ids]))
    state = jax.lax.stop_gradient(hidden)
    total, right = 0.0, []
    for k in range(drafter.n_heads):
        b, t = pairs_of(batch, k + 2)
        kernel = backbone.params["lm_head"]["kernel"][:, ids]
        if drafter.heads.lm_head != "shared":
            own = params[f"heads_{k}"]["lm_head"]
            kernel = own["kernel"] if "kernel" in own else own["down"] @ own["up"]
        apart = jnp.abs(features[k, b, t] - state[b, t + k + 1])
        near = jnp.where(apart < 1, 0.5 * apart**2, apart - 0.5).mean(-1).sum()
        loss = train.feature_weight * near
        label = tokens[b, t + k + 2]
        inside = np.isin(label, ids)
        logp = jax.nn.log_softmax(features[k] @ kernel)[b[inside], t[inside]]
        place = np.searchsorted(ids, label[inside])
        loss -= train.label_weight * logp[np.arange(len(place)), place].sum()
        p = teacher[b, t + k + 1][inside]
        loss -= train.teacher_weight * (p * logp).sum()
        loss += train.distance_weight * jnp.abs(p - jnp.exp(logp)).sum()
        total += 0.8 ** (k + 1) * loss / len(b)
        right.append((jnp.argmax(logp, axis=-1) == place).sum())
    if lambda_0 is None:
        return total, right
    b, t = pairs_of(batch, 1)
    q = jax.nn.log_softmax(backbone.lm_head(hidden))[b, t]
    if original is None:
        own = -q[np.arange(len(b)), tokens[b, t + 1]]
    else:
        p = jax.nn.log_softmax(original.lm_head(original.forward(*rows)))[b, t]
        own = (jnp.exp(p) * (p - q)).sum(-1)
    return own.mean() + lambda_0 * total, right


EVERY = np.arange(64)
FEW = np.sort(np.random.default_rng(7).permutation(64)[:40]).astype(np.int32)
MIXED = {"label_weight": 0.1, "teacher_weight": 0.7, "distance_weight": 0.9}
CASES = [
    *wide(("own", {}, EVERY), ("shared", {}, EVERY)),
    ("low_rank", {}, EVERY),
    ("shared", MIXED | {"feature_weight": 0.3}, FEW),
    *wide(("own", MIXED | {"hidden_noise": 9.0}, EVERY)),
    *wide(("own", MIXED, FEW), ("low_rank", MIXED | {"feature_weight": 0.3}, FEW)),
]


@pytest.mark.parametrize(("lm_head", "targets", "ids"), CASES)
def test_head_loss_is_equation_1(lm_head, targets, ids):
    """lambda_k = 0.8^k, each head's mean over its own pairs, head k on token t + k + 1.

    A token outside the draft vocabulary teaches nothing and is a miss.
    """
    draft_vocab = len(ids) if len(ids) < 64 else 0
    arch, whole, drafter, params, batch = heads_problem(lm_head=lm_head)
    backbone = whole
    if draft_vocab:
        backbone = vocabulary.narrowed(whole, jnp.asarray(ids))
        drafter = make_drafter(replace(drafter.heads, draft_vocab=draft_vocab), arch)
        params = jax.tree.map(np.float32, random_heads(drafter, backbone, seed=2))
    train = TrainConfig(loss_chunk=5, **targets)
    counts = pairs.pair_counts(batch, (2, 3, 4))
    inputs = pairs.StepInputs(batch, counts)

    def streamed(params):
        return head_loss(params, backbone, drafter, train, inputs)

    def plain(params):
        return plain_loss(params, whole, drafter, batch, train, ids)

    (value, sums), grads = jax.jit(jax.value_and_grad(streamed, has_aux=True))(params)
    wanted = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    (expected, right), expected_grads = wanted
    assert_close((value, grads), (expected, expected_grads))
    np.testing.assert_array_equal(sums.top1, right)
    labels = [np.isin(batch["tokens"][b, t + k + 2], ids) for k in range(3)
              for b, t in [pairs_of(batch, k + 2)]]  # fmt: skip
    np.testing.assert_array_equal(sums.scored, [x.sum() for x in labels])
    np.testing.assert_array_equal(counts, [len(x) for x in labels])


@pytest.mark.parametrize("kl", [*wide(False), True])
def test_joint_loss_is_equation_2(kl):
    """L_LM + lambda_0 sum_k 0.8^k L_k, and the gradients of all that both terms read.

    L_LM is the cross-entropy, or the KL divergence from the backbone before training.
    """
    arch, backbone, drafter, heads, batch = heads_problem(lm_head="shared")
    rng = np.random.default_rng(0)
    move = lambda x: np.float32(x + 0.1 * rng.standard_normal(x.shape))  # noqa: E731
    moved = jax.tree.map(move, backbone.params)
    params, original = {"backbone": moved, "heads": heads}, backbone if kl else None
    kind = "kl" if kl else "labels"
    train = TrainConfig("medusa2", dtype="float32", loss_chunk=5, backbone_loss=kind)
    groups = trained_groups(train.stage, 0)
    stage = make_stage(train, arch, groups, drafter, LoraConfig(), 1)
    counts = pairs.pair_counts(batch, stage.offsets)

    def streamed(params):
        inputs = pairs.StepInputs(batch, counts, lambda_0=jnp.float32(0.3))
        return stage.loss(params, {"teacher": backbone.params}, inputs)

    def plain(params):
        moved = Backbone(backbone.llama, params["backbone"])
        given = drafter, batch, train, EVERY, 0.3, original
        return plain_loss(params["heads"], moved, *given)[0]

    (value, sums), grads = jax.jit(jax.value_and_grad(streamed, has_aux=True))(params)
    expected, expected_grads = jax.jit(jax.value_and_grad(plain))(params)
    assert sums.nll.shape == (4,)
    assert_close((value, grads), (expected, expected_grads))


def test_noise_on_hidden_states_needs_a_key():
    """Uniform in +-noise / sqrt(L d) (Hydra 6.1), and only where the heads read."""
    _, backbone, drafter, params, batch = heads_problem()
    counts, seen = pairs.pair_counts(batch, (2, 3, 4)), []

    class Watched(type(drafter)):
        def features(self, params, backbone, rows):
            seen.append(rows.hidden_BTE)
            return super().features(params, backbone, rows)

    watched = Watched(drafter.heads, drafter.llama)

    @partial(jax.jit, static_argnums=0)
    def read(noise, key):
        inputs = pairs.StepInputs(batch, counts, key)
        head_loss(params, backbone, watched, TrainConfig(hidden_noise=noise), inputs)
        return seen.pop()

    key = jax.random.key(0)
    clean, evaluated, noisy = read(0.0, key), read(6.0, None), read(6.0, key)
    assert not seen
    np.testing.assert_array_equal(clean, evaluated)
    difference = np.asarray(noisy - clean)
    bound = 6.0 / np.sqrt(clean.shape[1] * clean.shape[2])
    assert 0.95 * bound < np.abs(difference).max() <= bound * 1.001
    assert abs(difference.mean()) < 0.1 * bound


# A chunk of logits is a sixteenth of a set: no head may hold one while another is walked.
ROWS, LENGTH, VOCAB, CHUNK = 4, 1024, 8192, 64
ALL_LOGITS = ROWS * LENGTH * VOCAB * 4


@cache
def peak(K, teacher):
    """Compiled peak memory of the gradient of K heads."""
    arch = training_arch(vocab_size=VOCAB, d_model=32, max_position=LENGTH)
    llama = Llama(arch)
    names = ("tokens", "positions", "segment_ids")
    batch = {n: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for n in names}
    batch["counted"] = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.bool_)
    base_params = jax.eval_shape(lambda k: init_params(arch, k), jax.random.key(0))
    drafter = make_drafter(HeadsConfig(n_heads=K), arch)
    init = lambda p: drafter.init(jax.random.key(0), Backbone(llama, p))  # noqa: E731
    params = jax.eval_shape(init, base_params)
    offsets = tuple(range(2, K + 2))

    def streamed(params, base_params, batch):
        train = TrainConfig(loss_chunk=CHUNK, teacher_weight=teacher)
        inputs = pairs.StepInputs(batch, pairs.pair_counts(batch, offsets))
        return head_loss(params, Backbone(llama, base_params), drafter, train, inputs)[0]

    gradient = jax.jit(jax.grad(streamed))
    memory = gradient.lower(params, base_params, batch).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


@pytest.mark.wide
@pytest.mark.parametrize("teacher", [0.0, 1.0])
def test_a_head_costs_less_than_one_chunk_of_logits(teacher):
    one, three, five = (peak(K, teacher) for K in (1, 3, 5))
    assert (three - one) / 2 < ALL_LOGITS / 16
    assert (five - three) / 2 < ALL_LOGITS / 16
