"""The demo's corpus on a small budget: the documented command, its files, its promises."""

import json
from pathlib import Path

import numpy as np
import pytest

from research.demo import corpus
from research.demo.sources import distinct_lines

pytestmark = pytest.mark.wide

TINY = {"vocab": 512, "limit_mb": 0.5, "heldout": 0.1, "prompts": 20, "seeds": 50}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The documented command on a tiny budget."""
    out = tmp_path_factory.mktemp("corpus")
    flags = [f"--{name}={value}" for name, value in TINY.items()]
    assert corpus.main(["--out", str(out), *flags]) == 0
    return out


@pytest.fixture(scope="module")
def tokenizer(built):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(built / "tokenizer")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def documents(folder: Path) -> list[np.ndarray]:
    tokens, starts = np.load(folder / "tokens.npy"), np.load(folder / "doc_starts.npy")
    assert tokens.dtype == np.uint16 and tokens.ndim == 1
    return np.split(tokens, starts[1:])


def test_heldout_is_not_in_train(built, tokenizer):
    train = [tokenizer.decode(ids[1:-1]) for ids in documents(built / "train")]
    held = [tokenizer.decode(ids[1:-1]) for ids in documents(built / "heldout")]
    assert not set(train) & set(held)
    for text in held:
        own = distinct_lines(text)
        for other in train:
            common = own & distinct_lines(other)
            assert len(common) < 5 or len(common) < 0.6 * len(own)
    together = "\n".join(train)
    for row in read(built / "heldout" / "prompts.jsonl"):
        assert row["prompt"] + row["continuation"] not in together
