"""What tokens cover, in bytes: together the text, none more than the longest."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from medusa_jax.interop.token_bytes import TokenBytes
from medusa_jax.interop.tokenizer import LONG, NoTokenizer, Tokenizer, load_tokenizer

TEXT = "The assistant  é日😀:\n\treturn [int(x)]"


@pytest.mark.parametrize("kind", ["byte_level_dir", "sentencepiece_dir"])
def test_bytes_together_are_the_text(kind, request):
    tokenizer = load_tokenizer(str(request.getfixturevalue(kind)))
    spelled, ids = TokenBytes(tokenizer), tokenizer.encode(TEXT)
    parts = [spelled.of(i) for i in ids]
    blank = b" " if kind == "sentencepiece_dir" else b""  # it puts one in front of a text
    assert b"".join(parts) == blank + TEXT.encode()
    assert any(part.decode(errors="ignore").encode() != part for part in parts)
    assert spelled.of(10**6) == b""
    [special] = tokenizer.encode(end := tokenizer.special_texts["eos_token"])
    assert spelled.of(special) == end.encode()


@pytest.mark.parametrize("kind", ["byte_level_dir", "sentencepiece_dir"])
def test_no_text_has_fewer_tokens_than_its_bytes_ask_for(kind, request):
    tokenizer = load_tokenizer(str(request.getfixturevalue(kind)))
    spelled = TokenBytes(tokenizer)
    special = tokenizer.special_texts.values()
    words = st.sampled_from(["assistant", " ", "  ", "é日😀", *special])

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.lists(words | st.text("aé日😀 \n\t\0", max_size=5)).map("".join))
    def check(text):
        assert spelled.least_tokens(text) <= len(tokenizer.encode(text))

    check()
    known = tokenizer.backend.get_vocab()
    assert spelled.longest <= max(len(word.encode()) for word in known) < 40
    assert spelled.least_tokens("a" * 1000) >= 25


def test_bytes_that_a_vocabulary_lacks_count_for_nothing():
    """As SmolLM2's does; its tokenizer drops them."""
    words = {c: i for i, c in enumerate("abÃ©")}
    backend = Backend(models.BPE(words, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    spelled = TokenBytes(tokenizer)
    assert spelled.longest == 1
    for text, tokens in (("ab" * 20, 40), ("x" * 99 + "a", 1), ("éa日", 3)):
        assert len(tokenizer.encode(text)) == tokens == spelled.least_tokens(text)


def bpe(**more):
    return Backend(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", **more))


def test_where_one_token_may_cover_anything_nothing_is_told():
    """Words, and an unknown token for a text of any length."""
    words = Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    for backend in (words, bpe(fuse_unk=True)):
        assert TokenBytes(Tokenizer(backend)).longest is None


@pytest.mark.parametrize(
    ("step", "how"),
    [
        ("normalizer", normalizers.NFC()),
        ("normalizer", normalizers.Replace("  ", "")),
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        ("pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
    ],
)
def test_where_a_text_may_shrink_nothing_is_told(step, how, byte_level_dir):
    tokenizer = load_tokenizer(str(byte_level_dir))
    assert TokenBytes(tokenizer).longest
    setattr(tokenizer.backend, step, how)
    assert TokenBytes(tokenizer).longest is None


def test_no_tokenizer():
    spelled = TokenBytes(NoTokenizer("nowhere"))
    assert spelled.longest is None and spelled.of(3) == b""


def test_long_texts_are_read_as_short_ones(byte_level_dir):
    tokenizer = load_tokenizer(str(byte_level_dir))
    text = "The assistant é " * (LONG // 10)
    direct = tokenizer.backend.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == direct.ids
    assert tokenizer.encode_with_offsets(text) == (direct.ids, direct.offsets)
