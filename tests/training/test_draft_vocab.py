"""Heads that learn to score some of the tokens: what teaches them, and which tokens they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import wide
from closeness import assert_close
from test_trainer import records, run
from training_setup import VOCAB, tiny_config, training_arch

from medusa_jax.config import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import vocabulary
from medusa_jax.heads.drafter import Backbone, TextRows
from medusa_jax.heads.registry import make_drafter
from medusa_jax.interop import heads_io
from medusa_jax.interop.heads_io import open_heads
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.sharding import make_mesh
from medusa_jax.training import losses
from medusa_jax.training.data.vocabulary import draft_vocab

IDS = np.sort(np.random.default_rng(7).permutation(VOCAB)[:40]).astype(np.int32)


def random_batch(B=2, T=18):
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, VOCAB, (B, T), np.int32),
        "positions": np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)),
        "segment_ids": np.repeat([[1] * 12 + [2] * (T - 12)], B, 0).astype(np.int32),
        "counted": rng.random((B, T)) < 0.9,
    }


def moved(init, *args):
    """What `init` starts with, away from there: many parts of it are zero."""
    rng = np.random.default_rng(3)
    start = jax.jit(init)(*args)
    return jax.tree.map(lambda x: np.float32(x + 0.1 * rng.standard_normal(x.shape)), start)


pair_mask = jax.jit(losses.pair_mask, static_argnums=2)
pair_counts = jax.jit(losses.pair_counts, static_argnums=1)


def pairs_inside(batch, offset):
    """Row and position of every pair that counts and whose label is chosen, and where among IDS."""
    mask = pair_mask(batch["counted"], batch["segment_ids"], offset)
    b, t = np.nonzero(np.asarray(mask))
    labels = np.asarray(batch["tokens"])[b, t + offset]
    chosen = np.isin(labels, IDS)
    return b[chosen], t[chosen], np.searchsorted(IDS, labels[chosen])


@pytest.mark.parametrize("lm_head", ["shared", *wide("own", "low_rank")])
def test_tokens_outside_teach_nothing_and_are_misses(lm_head):
    """Labels and the teacher's distribution over the chosen tokens alone, by hand.

    A hidden state to come near is there for every pair, whichever token the backbone wrote from it.
    """
    arch = training_arch()
    whole = Backbone(Llama(arch), init_params(arch, jax.random.key(1)))
    backbone = vocabulary.narrowed(whole, jnp.asarray(IDS))
    heads = HeadsConfig(n_heads=3, lm_head=lm_head, rank=4, draft_vocab=len(IDS))
    drafter = make_drafter(heads, arch)
    params = moved(drafter.init, jax.random.key(2), backbone)
    batch = random_batch()
    counts = pair_counts(batch, (2, 3, 4))
    rows = losses.rows(batch)
    pairs = [pairs_inside(batch, k + 2) for k in range(3)]
    marks = batch["counted"], batch["segment_ids"]
    every = [np.nonzero(np.asarray(pair_mask(*marks, k + 2))) for k in range(3)]

    def plain(params):
        """(loss, pairs right of each head), one gather a head."""
        hidden = whole.forward(*rows)
        features = drafter.features(params, whole, TextRows(hidden, *rows))
        teacher = jax.nn.softmax(whole.lm_head(hidden)[..., IDS])
        total, right = 0.0, []
        for k, (b, t, place) in enumerate(pairs):
            if lm_head == "shared":
                logits = whole.lm_head(features[k])[..., IDS]
            else:
                own = params[f"heads_{k}"]["lm_head"]
                kernel = own["kernel"] if lm_head == "own" else own["down"] @ own["up"]
                logits = features[k] @ kernel
            logp = jax.nn.log_softmax(logits)[b, t]
            hard = -logp[np.arange(len(place)), place].sum()
            soft = -(teacher[b, t + k + 1] * logp).sum()
            b, t = every[k]
            apart = optax.losses.huber_loss(features[k, b, t], hidden[b, t + k + 1])
            near = 0.3 * apart.mean(axis=-1).sum()
            total += 0.8 ** (k + 1) * (0.1 * hard + 0.7 * soft + near) / counts[k]
            right.append((jnp.argmax(logp, axis=-1) == place).sum())
        return total, right

    def streamed(params):
        targets = losses.HeadTargets(0.1, teacher_weight=0.7, feature_weight=0.3)
        objective = losses.HeadObjective(drafter, 5, 0.8, targets)
        inputs = losses.StepInputs(batch, counts)
        return losses.head_loss(params, backbone, objective, inputs)

    (value, sums), grads = jax.jit(jax.value_and_grad(streamed, has_aux=True))(params)
    by_hand = jax.jit(jax.value_and_grad(plain, has_aux=True))
    (expected, right), expected_grads = by_hand(params)
    assert_close((value, grads), (expected, expected_grads))
    inside = np.array([len(place) for _, _, place in pairs])
    assert (inside < counts).all() and (inside > 0).all()
    np.testing.assert_array_equal(sums.scored, inside)
    np.testing.assert_array_equal(sums.top1, right)


def few(tokens, model, stage="medusa1", **train):
    cfg = tiny_config(tokens, stage, **train)
    cfg.model.path, cfg.optim.name = model, "adamw"
    cfg.heads = HeadsConfig(n_heads=3, lm_head="shared", draft_vocab=40)
    return cfg


@pytest.mark.wide
def test_a_run_keeps_its_tokens(tokens, model, tmp_path, capsys):
    """Counted in the text; then resumed, and gone on with in stage 2, under other counts."""
    cfg = few(tokens, model, steps=4, save_every=4)
    cfg.data.eval_source, cfg.data.eval_samples = tokens, 8
    run(cfg, tmp_path / "m1")
    text = np.load(f"{tokens}/tokens.npy")
    counts = np.bincount(text, minlength=VOCAB)
    chosen = vocabulary.most_frequent(counts, 40)
    share = counts[chosen].sum() / counts.sum()
    said = capsys.readouterr().err
    assert f"heads score 40 of 64 tokens: {100 * share:.2f}% of the counted text" in said
    assert "  inside 0." in said
    log = records(tmp_path / "m1")[-1]
    assert np.abs(np.array(log["inside"]) - share).max() < 0.1
    assert all(np.array(log["top5"]) <= log["inside"])

    other = tmp_path / "counts.npy"
    np.save(other, np.arange(VOCAB))  # the last forty
    cfg = few(tokens, model, steps=6, save_every=6)
    cfg.data.draft_vocab_from = str(other)
    run(cfg, tmp_path / "m1")
    assert "resuming from step 4" in capsys.readouterr().err
    export = str(tmp_path / "m1" / "export")
    np.testing.assert_array_equal(open_heads(export).ids, chosen)
    loaded = heads_io.load_heads(export, cfg.model.arch, make_mesh())[1]
    assert set(loaded) == {"heads_0", "heads_1", "heads_2", vocabulary.GROUP}

    cfg = few(tokens, model, "medusa2", steps=2)
    cfg.train.heads_path, cfg.data.draft_vocab_from = export, str(other)
    run(cfg, tmp_path / "m2")
    heads = str(tmp_path / "m2" / "export" / "heads")
    np.testing.assert_array_equal(open_heads(heads).ids, chosen)
    log = records(tmp_path / "m2")[-1]
    assert len(log["inside"]) == 3 and "lm_inside" not in log


def test_tokens_are_chosen_by_the_counts_that_are_named(tmp_path):
    class Rows:
        def counts(self, vocab_size):
            return np.ones(vocab_size, int)

    folder = tmp_path / "answers"
    folder.mkdir()
    counts = np.zeros(VOCAB, np.int64)
    counts[[9, 60, 33]] = 1, 2, 3
    np.save(folder / vocabulary.COUNTS, counts)
    given = (VOCAB, Rows(), str(tmp_path), str(folder))
    assert draft_vocab(HeadsConfig(draft_vocab=3), *given).tolist() == [9, 33, 60]
    with pytest.raises(UserError, match=r"ids of shape \[3\], draft_vocab is 4"):
        draft_vocab(HeadsConfig(draft_vocab=4), *given)
