"""Two tiny tokenizers on disk."""

from tokenizer_dirs import byte_level_dir, sentencepiece_dir, tokenizer_json  # noqa: F401
