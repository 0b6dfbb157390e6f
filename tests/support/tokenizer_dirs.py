"""Fixtures of two tiny tokenizers: sentencepiece with byte fallback, and byte-level BPE."""

import json

import pytest
from pieces import train_byte_level, train_sentencepiece
from tokenizers import decoders, processors

CORPUS = [
    "A chat between a curious user and an artificial intelligence assistant.",
    "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    "USER: Hello, how are you? ASSISTANT: I am fine, thank you.",
    "def parse(text):\n    return [int(x) for x in text.split()]",
    "Two  blanks, a tab\tand the end.",
] * 4


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory):
    """A directory with tokenizer.model and nothing else but small JSON files, as Vicuna's."""
    path = tmp_path_factory.mktemp("sentencepiece")
    text = "\n".join(CORPUS).replace("\n    ", " ")
    own = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    train_sentencepiece(path, text, 400, **own)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory):
    """A directory with tokenizer.json, with Llama-3's and ChatML's special tokens in it."""
    names = "begin_of_text end_of_text eot_id start_header_id end_header_id im_start im_end"
    tokenizer = train_byte_level(CORPUS, 400, [f"<|{name}|>" for name in names.split()])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    path = tmp_path_factory.mktemp("byte_level")
    tokenizer.save(str(path / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<|begin_of_text|>", "special": True}
    settings = {"bos_token": bos, "eos_token": "<|end_of_text|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return path


@pytest.fixture(scope="session")
def tokenizer_json(byte_level_dir):
    return (byte_level_dir / "tokenizer.json").read_text()
