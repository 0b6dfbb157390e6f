"""A tiny backbone and two tiny tokenizers on disk."""

import pytest
from tokenizer_dirs import byte_level_dir, sentencepiece_dir, tokenizer_json  # noqa: F401


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The backbone of `our_heads`, on disk."""
    from our_heads import write_base

    return write_base(tmp_path_factory.mktemp("base"))
