"""Marking repeats, and mixing what the model wrote with the corpus."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from medusa_jax.demo.refine import completes_repeat, marked_samples, write_mixture


def test_the_docstring_example():
    a, b, c = 0, 1, 2
    got = completes_repeat(np.array([a, b, a, b, c, a, b]), n=2)
    assert got.tolist() == [False, False, False, True, False, False, True]


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4))
def test_a_token_is_marked_if_its_ngram_stands_earlier(tokens, n):
    got = completes_repeat(np.array(tokens, np.int32), n)
    for t in range(len(tokens)):
        gram = tokens[t - n + 1 : t + 1] if t >= n - 1 else None
        earlier = [tokens[s - n + 1 : s + 1] for s in range(n - 1, t)]
        assert got[t] == (gram is not None and gram in earlier)


def test_prompts_neither_count_nor_are_marked():
    sample = {"prompt_ids": [1, 2, 3, 4, 1, 2, 3, 4], "token_ids": [1, 2, 9, 8]}
    ((tokens, counted),) = marked_samples([sample])
    assert tokens.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 9, 8]
    # 2 3 4 1 and 3 4 1 2 stood in the prompt: the new text repeats them.
    assert counted.tolist() == [0] * 8 + [-1, -1, 1, 1]


def test_the_mixture_holds_the_asked_share_of_corpus(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    np.save(corpus / "tokens.npy", np.arange(1000, 3000, dtype=np.uint16))
    sample = {"prompt_ids": list(range(50)), "token_ids": list(range(50, 100))}
    write_mixture(marked_samples([sample] * 4), corpus, 0.75, 100, 0, tmp_path / "out")
    tokens = np.load(tmp_path / "out" / "tokens.npy")
    counted = np.load(tmp_path / "out" / "counted.npy")
    starts = np.load(tmp_path / "out" / "doc_starts.npy")
    assert len(tokens) == len(counted) == 1600 and len(starts) == 16
    assert np.mean(tokens >= 1000) == 0.75
    assert counted.dtype == np.int8 and np.all(counted[tokens >= 1000] == 1)
    assert np.all(np.diff(starts) == 100)
