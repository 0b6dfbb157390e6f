"""The demo's corpus on a small budget, by the documented command: what is held out is not learned."""

import numpy as np
import pytest
from files import read_lines

from research.demo import corpus
from research.demo.sources import distinct_lines

TINY = {"vocab": 512, "limit_mb": 0.5, "heldout": 0.1, "prompts": 20, "seeds": 50}


@pytest.mark.wide
def test_heldout_is_not_in_train(tmp_path):
    from transformers import AutoTokenizer

    flags = [f"--{name}={value}" for name, value in TINY.items()]
    assert corpus.main(["--out", str(tmp_path), *flags]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")

    def texts(part):
        tokens = np.load(tmp_path / part / "tokens.npy")
        starts = np.load(tmp_path / part / "doc_starts.npy")
        assert tokens.dtype == np.uint16 and tokens.ndim == 1
        return [tokenizer.decode(ids[1:-1]) for ids in np.split(tokens, starts[1:])]

    train, held = texts("train"), texts("heldout")
    assert train and held and not set(train) & set(held)
    for text in held:
        own = distinct_lines(text)
        for other in train:
            common = own & distinct_lines(other)
            assert len(common) < 5 or len(common) < 0.6 * len(own)
    together = "\n".join(train)
    for row in read_lines(tmp_path / "heldout" / "prompts.jsonl"):
        assert row["prompt"] + row["continuation"] not in together
