"""Heads that learn to score some of the tokens: what teaches them, and which tokens they are."""

import numpy as np
import pytest
from training_setup import VOCAB, records, run, tiny_config

from medusa_jax.config import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import vocabulary
from medusa_jax.interop import heads_io
from medusa_jax.interop.heads_io import open_heads
from medusa_jax.sharding import make_mesh
from medusa_jax.training.setup import draft_vocab


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
    with pytest.raises(UserError, match="should hold 4 ascending token ids below 64"):
        draft_vocab(HeadsConfig(draft_vocab=4), *given)
