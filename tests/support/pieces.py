"""A sentencepiece model trained here, and the small JSON files next to one."""

import json
from pathlib import Path

import pytest


def train_sentencepiece(path: Path, text: str, vocab_size: int, **options: object) -> None:
    """tokenizer.model with byte fallback and tokenizer_config.json, as Vicuna's."""
    spm = pytest.importorskip("sentencepiece")
    (path / "text.txt").write_text(text)
    spm.SentencePieceTrainer.train(
        input=str(path / "text.txt"),
        model_prefix=str(path / "tokenizer"),
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
