"""The memory of reading a prompt, from shapes alone."""

import json

import pytest

from medusa_jax.config import LlamaConfig
from research import prefill_cost

SMALL = LlamaConfig(512, 128, 1, 4, 2, 32, 256, 8192)


@pytest.mark.wide
def test_temporaries_do_not_grow_with_the_prompt():
    """Through a drafter with a layer of its own; four times the tokens, a few numbers each."""
    short, long = (
        prefill_cost.temporary_bytes(SMALL, "hydrapp", 2, tokens) for tokens in (1024, 4096)
    )
    assert long - short < 2 * (4096 - 1024) * 32
    assert short < 2 * 512 * 4 * (3 * 256 + 12 * 128 + 2 * 4 * 512)


def test_command(monkeypatch, capsys):
    """A prompt that is no power of two, and a cache with room for the tree behind it."""
    monkeypatch.setitem(prefill_cost.SHAPES, "llama-7b", SMALL)
    assert prefill_cost.main(["--tokens", "500", "--batch", "2", "--json"]) == 0
    (row,) = (found := json.loads(capsys.readouterr().out))["rows"]
    assert row["slots"] == 512
    assert row["caches"] == 2 * (1 * 2 * 2 * 32 * 512 + 128) * 2
    monkeypatch.setattr(prefill_cost, "measure", lambda *_: found)
    assert prefill_cost.main([]) == 0
    assert "| 500 | 512 |" in capsys.readouterr().out
