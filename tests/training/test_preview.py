"""The sample that a dry run shows: the marked text is exactly what the loss counts."""

import json

import pytest

from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError
from medusa_jax.interop.tokenizer import load_tokenizer
from medusa_jax.training.dry import mark_counted, preview


def shown(vicuna, source, seq_len=256):
    return preview(DataConfig(str(source), seq_len=seq_len, chat_template="vicuna"), vicuna)


def test_the_assistant_s_words_are_marked_and_nothing_else(vicuna, sharegpt):
    text, legend = shown(vicuna, sharegpt).split("-" * 60)
    assert (
        "USER: What is a tree? ASSISTANT:⟦ A tree is a graph without cycles.</s>⟧USER:"
        in text
    )
    assert text.count("⟦") == 2 and text.rstrip().endswith("side by side.</s>⟧")
    ids = load_tokenizer(vicuna).encode(text.replace("⟦", "").replace("⟧", "").strip())
    assert f"sample 0 of 9 in {sharegpt}" in legend and f"of {len(ids)} tokens, " in legend


def test_line_breaks_inside_an_answer_are_seen(vicuna):
    tokenizer = load_tokenizer(vicuna)
    ids = tokenizer.encode("a é\nb")
    counted = [False, *[True] * (len(ids) - 1)]
    assert mark_counted(tokenizer, ids, counted).count("↵⟧\n⟦b⟧") == 1


def test_a_cut_sample_is_shown_cut_and_unusable_ones_are_skipped(vicuna, tmp_path):
    source = tmp_path / "talk.jsonl"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo " * 90}]
    source.write_text("{broken\n" + json.dumps({"messages": talk}))
    said = shown(vicuna, source, 240)
    assert "sample 1 of 2" in said and ": 240 of " in said
    source.write_text("{broken\n")
    with pytest.raises(UserError, match=r"none of the 1 samples .*broken JSON"):
        shown(vicuna, source)
