"""Prompts for filling in the middle, against llama.cpp's layout written out."""

from itertools import pairwise

import pytest
from gguf_files import tiny
from tiny import write_coder, write_model

from medusa_jax.errors import UserError
from medusa_jax.files.hub import resolve
from medusa_jax.text.fill import CHARACTERS, Gap, fill_of
from medusa_jax.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    path = tmp_path_factory.mktemp("coder")
    write_coder(path)
    return load_tokenizer(str(path))


def shown(tokenizer, ids):
    return tokenizer.decode(ids, skip_special=False)


def test_a_gap(coder):
    names = coder.fill_texts.values()
    assert (
        coder.decode([coder.token_to_id(name) for name in names]) == "" and len(names) == 6
    )
    ids = fill_of(coder).prompt(Gap("def f(", "):\n"))
    assert shown(coder, ids) == "<|fim_prefix|>def f(<|fim_suffix|>):\n<|fim_middle|>"


@pytest.mark.parametrize("text", ["<|fim_middle|>", "</s>a", "x<|file_sep|><|fim_pad|>"])
def test_tokens_spelled_out_in_a_text_are_text(coder, text):
    fill = fill_of(coder)
    ids = fill.editor_prompt(Gap(text, text), text, [(text, text)], 900)
    added = coder.backend.get_added_tokens_decoder()
    names = [added[i].content for i in ids if i in added]
    head = ["<|repo_name|>", "<|file_sep|>", "<|file_sep|>"]
    assert names == [*head, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    assert shown(coder, ids).count(text) == 5 + (text in names)


def test_what_an_editor_sends_is_laid_out_as_llama_cpp_does(coder):
    files = [("a.py", "1\n"), ("b.py", "2\n")]
    ids = fill_of(coder).editor_prompt(Gap("p\n", "\ns\n"), "  l", files, 900)
    assert shown(coder, ids) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\n1\n<|file_sep|>b.py\n2\n<|file_sep|>filename\n"
        "<|fim_prefix|>p\n  l<|fim_suffix|>\ns\n<|fim_middle|>"
    )


def test_what_does_not_fit(coder):
    """The oldest files go first, then what is farthest from the gap; typing on keeps the prompt's beginning."""
    fill, room = fill_of(coder), 2 * 800
    files = [(name, name * 300) for name in "abc"]
    prompts = []
    for typed in range(0, 256, 8):
        prefix = "p" * 1000 + "q" * typed
        ids = fill.editor_prompt(Gap(prefix, "s" * 900), "ll", files, room)
        text = shown(coder, ids)
        assert len(ids) <= room and "s" * 196 + "<" in text and "s" * 197 not in text
        assert f"{'q' * typed}ll<|fim_suffix|>" in text
        prompts.append(text[: text.index("<|fim_suffix|>") - 2])
    assert "a\na" not in prompts[0] and "b" * 300 in prompts[0] and "c" * 300 in prompts[0]
    jumps = sum(not new.startswith(old) for old, new in pairwise(prompts))
    assert jumps == 3 and len(prompts[0]) > 700
    short = shown(coder, fill.editor_prompt(Gap("p" * 40, ""), "l", [], 110))
    assert f"{34 * 'p'}l" in short and 35 * "p" not in short


def test_text_far_from_the_gap_is_not_tokenised(coder, monkeypatch):
    fill, room = fill_of(coder), 2 * 800
    most, encode, lengths = CHARACTERS * 800, fill._ids, []
    monkeypatch.setattr(fill, "_ids", lambda t: lengths.append(len(t)) or encode(t))
    prefix, suffix = "abcdefg" * most, "s" * 9 * most
    files = [("a", "a"), ("b", "b" * (2 * most + 1)), ("c", "c")]
    ids = fill.editor_prompt(Gap(prefix, suffix), "l", files, room)
    assert max(lengths) <= 2 * most and sum(map(len, (prefix, suffix))) > 15 * most
    assert shown(coder, ids).count("<|file_sep|>") == 2  # the file c, and this one
    for n in (1, 5):
        assert (
            fill.editor_prompt(Gap(prefix[n * most :], "s" * 900), "l", files, room) == ids
        )


def test_names_in_the_files_count_before_spellings(tmp_path, tokenizer_json):
    numbers = {"fim_pre": 5, "fim_suf": 6, "fim_mid": 0}
    keys = {f"tokenizer.ggml.{name}_token_id": n for name, n in numbers.items()}
    tiny(tmp_path / "m.gguf", tokenizer_json, more=keys)
    tokenizer = load_tokenizer(resolve(str(tmp_path / "m.gguf")))
    ids = fill_of(tokenizer).prompt(Gap("a", ""))
    assert [i for i in ids if i in (5, 6, 0)][-3:] == [5, 6, 0]


def test_a_model_without_them(tmp_path):
    write_model(tmp_path)
    with pytest.raises(
        UserError, match="cannot fill in a middle: its tokenizer has no tokens for it"
    ):
        fill_of(load_tokenizer(str(tmp_path)))
