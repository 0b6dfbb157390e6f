"""Tokenizers trained here: a sentencepiece model with the small JSON files next to it; byte-level BPE."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import medusa_jax.text.tokenizer

# They drop the first space of a text; Llama 2's, and those of newer files.
REPLACE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
LLAMA = decoders.Sequence([*REPLACE, decoders.Strip(" ", 1, 0)])
METASPACE = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])


def train_byte_level(
    texts: Sequence[str], vocab_size: int, special: Sequence[str] = (), words: bool = True
) -> Tokenizer:
    """Byte-level BPE with merges within the words of GPT-2's splitting, or anywhere."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def like_llama(decoder=LLAMA):
    """A tokenizer with byte fallback, whose texts begin with a space that decoding drops."""
    words = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁aint"]
    model = models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    backend, steps = Tokenizer(model), [normalizers.Prepend("▁")]
    steps += [normalizers.Replace(" ", "▁")]
    backend.normalizer, backend.decoder = normalizers.Sequence(steps), decoder
    backend.add_special_tokens(["<s>"])
    return medusa_jax.text.tokenizer.Tokenizer(backend)


def drop_first_space(tokenizer, monkeypatch):
    """It does so from now on; returns biases that make every new token a space."""
    monkeypatch.setattr(tokenizer.backend, "decoder", LLAMA)
    return {str(tokenizer.token_to_id(" ")): 100}


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
