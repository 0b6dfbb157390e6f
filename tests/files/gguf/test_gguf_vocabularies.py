"""Tokenizers of GGUF files against those that they were written from."""

import time
from contextlib import suppress

import numpy as np
import pytest
from gguf_files import (
    byte_level_metadata,
    llama_tensors,
    sentencepiece_metadata,
    shape_metadata,
    strings,
    write,
)
from pieces import train_byte_level
from refusals import refused
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from medusa_jax.errors import UserError
from medusa_jax.files.gguf.reader import read_gguf
from medusa_jax.files.gguf.vocabulary import SPLITTINGS, build_tokenizer, tokenizer_settings

# Regular expressions as the published tokenizer.json files have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "llama-bpe": [LLAMA3],
    "falcon3": [LLAMA3],
    "qwen2": [QWEN2],
    "tekken": [TEKKEN],
    "gpt-4o": [O200K],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        DEEPSEEK3,
    ],
}
KINDS = ["gpt-2", "smollm", *PATTERNS]
# Where rules differ: case, marks, digits of other scripts, slashes at line ends.
HARD = ["Ա Բա ԱբԳ", "ǅa \u0294x ª", "XMLHttpRequest fooBAR", "IT'S don'T", "a/b/c\n//\n", "…“q”", "\uff11\uff12\uff13\uff14\uff15",
        "กข ไทย", "한국어 조선 カタカナ ひら", "x\u200by", "e\u0301a", "!!hello ?wo", "+1 = 2 ^ ~ | $ 5"]  # fmt: skip
TEXTS = strings(300, HARD)


def published(kind):
    """A tokenizer that splits as the published ones of its kind do. All have merges across digits and blanks,
    learnt by GPT-2's rule."""
    tokenizer = train_byte_level(TEXTS, 900, ["<|end|>", "<|turn|>"])
    steps = [step := tokenizer.pre_tokenizer]
    if kind == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), step]
    if kind in PATTERNS:
        step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PATTERNS[kind]]
        steps = [*splits, step]
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def trained():
    """One tokenizer a kind."""
    return {kind: published(kind) for kind in KINDS}


def read(path, metadata):
    return build_tokenizer(read_gguf(write(path, metadata, {})))


@pytest.mark.parametrize(
    ("tokens", "changes", "why"),
    [
        (["a", "b"], {"scores": [0.0]}, "the scores of 1"),
        # Every place to cut it at was tried: 35 seconds.
        (["a", "b", "a" * 300_000], {}, "a token has 300000 characters"),
        # The library panics at a merge of something longer than its parts.
        (["a", "aaa"], {"model": "gpt2", "pre": "gpt-2", "merges": ["aaa a", "a aaa"]}, "does not fit together"),
    ],
)  # fmt: skip
def test_hostile_vocabularies_are_refused_soon(tokens, changes, why, tmp_path):
    start = time.monotonic()
    with refused(why):
        read(tmp_path / "a.gguf", sentencepiece_metadata(tokens, **changes))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("kind", KINDS)
def test_byte_level_kinds_split_as_published(kind, trained, tmp_path):
    theirs = trained[kind]
    ours = read(tmp_path / "a.gguf", byte_level_metadata(theirs.to_str(), kind))
    texts = [*TEXTS, "a<|end|>b <|turn|>\n", "", " ", "  12  345\n\n\n6", "e\u0301"]
    assert [ours.encode(t).ids for t in texts] == [theirs.encode(t).ids for t in texts]
    ids = [ours.encode(text).ids for text in texts]
    assert [ours.decode(i) for i in ids] == [theirs.decode(i) for i in ids]


# tekken's and o200k's expressions are rewritten there, Qwen's texts are not composed.
OTHERWISE = {"tekken", "gpt-4o", "llama4", "kanana2", "qwen2", "deepseek-r1-qwen"}


@pytest.mark.parametrize("name", sorted(SPLITTINGS.keys() - OTHERWISE))
def test_text_is_split_as_in_llama_cpp(name, merged_anywhere, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    path = tmp_path / "a.gguf"
    metadata = byte_level_metadata(merged_anywhere, name) | shape_metadata("llama")
    size = len(metadata["tokenizer.ggml.tokens"])
    ours = read(path, metadata)
    write(path, metadata, llama_tensors(size))
    theirs = llama_cpp.Llama(str(path), n_ctx=64, verbose=False, vocab_only=True)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.tokenize(text.encode(), add_bos=False), text


@pytest.fixture(scope="module")
def merged_anywhere():
    """A tokenizer.json whose merges know nothing of words."""
    return train_byte_level(TEXTS, 900, words=False).to_str()


@pytest.mark.parametrize("said", [None, ""])
def test_a_file_that_does_not_say_how_text_is_split(
    said, merged_anywhere, tmp_path, capsys
):
    """llama.cpp's default, with a note."""
    silent = read(tmp_path / "a.gguf", byte_level_metadata(merged_anywhere, said))
    assert "does not say how its tokenizer splits text" in capsys.readouterr().err
    ours = read(tmp_path / "b.gguf", byte_level_metadata(merged_anywhere, "default"))
    assert not capsys.readouterr().err
    for text in TEXTS:
        assert silent.encode(text).ids == ours.encode(text).ids
    split = ours.pre_tokenizer.pre_tokenize_str("x1234567 =$y don't")
    pieces = ["x", "123", "456", "7", "Ġ", "=$", "y", "Ġdon", "'", "t"]
    assert [piece for piece, _ in split] == pieces


@pytest.mark.parametrize(
    ("kind", "tokens", "types", "text", "shown"),
    [
        # Llama 3's vocabulary has words that no merges lead to.
        ("llama-bpe", ["Ġxyzzyq"], [1], "an xyzzyq", "an xyzzyq"),
        # User-defined tokens stay whole and visible; the second is unused.
        ("gpt-2", ["[PAD9]", "<think>"], [5, 4], "a<think>b<|end|>", "a<think>b"),
    ],
)
def test_tokens_without_merges(kind, tokens, types, text, shown, trained, tmp_path):
    metadata = byte_level_metadata(trained[kind].to_str(), kind)
    metadata["tokenizer.ggml.tokens"] += tokens
    metadata["tokenizer.ggml.token_type"] += types
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    ours = read(tmp_path / "a.gguf", metadata)
    ids = ours.encode(text).ids
    assert last in ids and ours.decode(ids) == shown
    # Elsewhere words need their merges; of two tokens spelt the same the first counts.
    metadata = byte_level_metadata(trained["qwen2"].to_str(), "qwen2")
    first = metadata["tokenizer.ggml.tokens"].index("a")
    metadata["tokenizer.ggml.tokens"] += ["Ġxyzzyq", "a"]
    metadata["tokenizer.ggml.token_type"] += [1, 1]
    ours = read(tmp_path / "b.gguf", metadata)
    assert ours.encode("a").ids == [first]
    assert len(metadata["tokenizer.ggml.tokens"]) - 2 not in ours.encode("an xyzzyq").ids


@pytest.fixture(scope="module")
def sentencepiece(sentencepiece_dir):
    """A model of sentencepiece, and its metadata."""
    spm = pytest.importorskip("sentencepiece")
    model = spm.SentencePieceProcessor(str(sentencepiece_dir / "tokenizer.model"))
    pieces = range(model.get_piece_size())
    kinds = {2: model.is_unknown, 3: model.is_control, 6: model.is_byte, 1: lambda i: True}
    return model, sentencepiece_metadata(
        [model.id_to_piece(i) for i in pieces],
        [next(kind for kind, fits in kinds.items() if fits(i)) for i in pieces],
        [model.get_score(i) for i in pieces],
        unknown_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def test_sentencepiece_is_sentencepiece(sentencepiece, tmp_path):
    """Blanks, byte fallback, every text with its blank before it, or none; special tokens as well."""
    model, metadata = sentencepiece
    ours = read(tmp_path / "a.gguf", metadata)
    texts = [*TEXTS, "Hello, how are you?", "  two blanks", "polite  answers ", "▁"]
    for text in texts:
        ids = model.encode(text)
        assert ours.encode(text).ids == ids
        assert ours.decode(ids) == model.decode(ids)
    assert ours.encode("</s>").ids == [2]
    assert ours.encode("<unk>").ids == [0] and ours.decode([0]) == ""  # as in llama.cpp
    without = metadata | {"tokenizer.ggml.add_space_prefix": False}
    without = read(tmp_path / "b.gguf", without)
    assert without.decode(without.encode(" a").ids) == " a"
    assert without.encode(" user").ids == ours.encode("user").ids


def test_equal_scores_are_sentencepieces_or_refused(tmp_path):
    """It merges the leftmost of them first. In llama.cpp missing scores are equal."""
    spm = pytest.importorskip("sentencepiece")
    pb = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    rng, known = np.random.default_rng(0), []
    texts = ["".join(row) for row in rng.choice(list("abcd"), (40, 16))]
    for n in range(300):
        words = ["<unk>", *"▁abcd"]
        for _ in range(1 + n % 7):
            words.append("".join(rng.choice(words[2:], 2)))
        words = [*dict.fromkeys(words)]
        scores = [-float(score) for score in rng.integers(0, 1 + n % 6, len(words))]
        kinds = [2, *[1] * len(words[1:])]
        metadata = sentencepiece_metadata(words, kinds, scores)
        if not any(scores):
            del metadata["tokenizer.ggml.scores"]
        rows = zip(words, scores, kinds)
        pieces = [{"piece": word, "score": s, "type": kind} for word, s, kind in rows]
        model = pb.ModelProto(pieces=pieces, trainer_spec={"model_type": 2})
        theirs = spm.SentencePieceProcessor(model_proto=model.SerializeToString())
        with suppress(UserError):
            ours = read(tmp_path / "a.gguf", metadata)
            assert [ours.encode(text).ids for text in texts] == theirs.encode(texts)
            known.append(n % 6)
    assert {*known} == {*range(6)} and len(known) < 250


def test_who_begins_with_the_bos(sentencepiece, trained, tmp_path):
    """What the file says; else SentencePiece and Llama 3 do, others do not."""

    def adds(metadata, said=None):
        more = {} if said is None else {"tokenizer.ggml.add_bos_token": said}
        file = read_gguf(write(tmp_path / "a.gguf", metadata | more, {}))
        return tokenizer_settings(file)["add_bos_token"]

    assert adds(sentencepiece[1]) and not adds(sentencepiece[1], False)
    for kind, expected in (("llama-bpe", True), ("qwen2", False)):
        metadata = byte_level_metadata(trained[kind].to_str(), kind)
        assert adds(metadata) == expected
        assert adds(metadata, not expected) != expected
