"""Bits per byte and the Kneser-Ney baseline, against direct definitions."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_jax.errors import UserError
from research.demo import ngrams
from research.demo.ngrams import NgramModel, bits_per_byte

small_texts = st.lists(st.integers(0, 4), min_size=12, max_size=60)


def test_bits_per_byte():
    assert bits_per_byte(2.0, 4.0) == pytest.approx(0.7213, abs=1e-4)


def slow_probability(docs, order, vocab, discounts, context, token):
    """Modified Kneser-Ney straight from the recursion, over lists of documents."""

    def counts(n):
        if n == order:
            return Counter(tuple(d[i : i + n]) for d in docs for i in range(len(d) - n + 1))
        before = {
            tuple(d[i : i + n + 1]) for d in docs for i in range(len(d) - n)
        }  # different longer n-grams
        own = Counter(gram[1:] for gram in before)
        own.update(tuple(d[:n]) for d in docs if len(d) >= n)
        return own

    p = 1 / vocab
    for n in range(1, min(order, len(context) + 1) + 1):
        h = tuple(context[len(context) - n + 1 :])
        after = {g[-1]: c for g, c in counts(n).items() if g[:-1] == h}
        total = sum(after.values())
        if total:
            cut = {w: discounts[n - 1][min(c, 3) - 1] for w, c in after.items()}
            own = after.get(token, 0) - cut.get(token, 0)
            p = own / total + sum(cut.values()) / total * p
    return p


@settings(max_examples=40, deadline=None)
@given(st.lists(small_texts, min_size=1, max_size=3), st.integers(1, 4))
def test_equals_the_recursion(docs, order):
    tokens = np.concatenate(docs)
    starts = np.cumsum([0] + [len(d) for d in docs[:-1]])
    model = NgramModel.fit(tokens, 6, starts, order)
    for context in ([], [1], [0, 1], [2, 2, 3], docs[0][:5], docs[-1][-4:]):
        probs = model.next_probs(context)
        expected = [
            slow_probability(docs, order, 6, model.discounts, context[-(order - 1) :], w)
            if order > 1
            else slow_probability(docs, order, 6, model.discounts, [], w)
            for w in range(6)
        ]
        np.testing.assert_allclose(probs, expected, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(small_texts, st.lists(st.integers(0, 6), max_size=8), st.integers(1, 5))
def test_sums_to_one(tokens, context, order):
    probs = NgramModel.fit(np.array(tokens), 7, order=order).next_probs(context)
    assert probs.shape == (7,) and (probs > 0).all()
    assert probs.sum() == pytest.approx(1.0, abs=1e-12)


def test_sums_to_one_in_a_large_vocabulary_after_tuning():
    rng = np.random.default_rng(0)
    text = np.minimum(rng.zipf(1.3, 20000), 65535) % 5000
    model = NgramModel.fit(text[:15000], 5000)
    untuned = -model.log_probs(text[15000:]).mean()
    assert model.tune(text[15000:], sweeps=1) < untuned
    assert -model.log_probs(text[15000:]).mean() < untuned
    for i in (16000, 17000, 18000):
        assert model.next_probs(text[i - 4 : i]).sum() == pytest.approx(1.0, abs=1e-10)


def test_log_probs_agree_with_next_probs_and_respect_documents():
    rng = np.random.default_rng(1)
    text = rng.integers(0, 4, 400)
    starts = np.array([0, 3, 100, 250])
    model = NgramModel.fit(text, 4, starts)
    scores = model.log_probs(text, starts)
    assert scores.shape == (400 - 4,)
    expected = []
    for first, last in zip(starts, [*starts[1:], 400]):
        for i in range(first + 1, last):
            expected.append(math.log(model.next_probs(text[first:i])[text[i]]))
    np.testing.assert_allclose(scores, expected, rtol=1e-12)


def test_learns_a_deterministic_text_and_beats_lower_orders():
    text = np.tile([0, 1, 0, 2, 0, 1, 0, 3], 200)
    nats = [-NgramModel.fit(text, 5, order=n).log_probs(text).mean() for n in (1, 2, 4, 5)]
    assert nats[0] > nats[1] > nats[2] > nats[3]
    # Three tokens leave 2 or 3 open after "0 1 0", a quarter of the text; four do not.
    assert nats[2] == pytest.approx(math.log(2) / 4, abs=0.01) and nats[3] < 0.02


@pytest.mark.parametrize("tokens, order", [([1, 2], 5), ([1, 9, 1, 2], 2), ([1, -1, 2], 2)])
def test_bad_input(tokens, order):
    with pytest.raises(UserError):
        NgramModel.fit(np.array(tokens), 5, order=order)


def test_baseline_command(tmp_path, capsys):
    rng = np.random.default_rng(2)
    for name, docs in (("train", 30), ("heldout", 3)):
        folder = tmp_path / name
        folder.mkdir()
        np.save(folder / "tokens.npy", rng.integers(0, 9, docs * 50).astype(np.uint16))
        np.save(folder / "doc_starts.npy", np.arange(docs) * 50)
    about = {"settings": {"vocab": 9}, "splits": {"heldout": {"bytes": 600}}}
    (tmp_path / "corpus.json").write_text(json.dumps(about))
    assert ngrams.main([str(tmp_path), "--order", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    # Random tokens: no model beats log2(9) bits by more than luck.
    assert 3.1 < result["bits_per_token"] < 3.5
    assert result["bits_per_byte"] == pytest.approx(
        result["bits_per_token"] * result["heldout_tokens"] / 600
    )
    assert ngrams.main([str(tmp_path / "nowhere")]) == 2
    assert "no token stream" in capsys.readouterr().err
