"""Tokenizers without a tokenizer.json, such as sentencepiece's tokenizer.model."""

import os
from typing import Any

from medusa_jax.errors import UserError, first_line
from medusa_jax.interop.tensors import optional_json

# Fields of sentencepiece's ModelProto, in file order.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
LENGTH_DELIMITED = 2


def read_backend(directory: str) -> Any:
    """The `tokenizers.Tokenizer` that transformers makes of a directory's files.

    Raises:
      UserError: it cannot.
    """
    pieces = os.path.join(directory, "tokenizer.model")
    if os.path.isfile(pieces):
        check_whole(pieces)
    # Importing transformers without torch would print a notice.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer, LlamaTokenizer

    config = optional_json(os.path.join(directory, "config.json"))
    settings = optional_json(os.path.join(directory, "tokenizer_config.json"))
    known = "model_type" in config or "tokenizer_class" in settings
    loader = AutoTokenizer if known else LlamaTokenizer
    try:
        # Without an explicit False, transformers asks on stdin whether to run the model's code.
        backend = loader.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
    except Exception as error:  # anything from a missing class to a malformed protobuf
        problem = f"the tokenizer in {directory} cannot be read: {first_line(error)}"
        raise UserError(problem) from error
    return backend


def check_whole(path: str) -> None:
    """Check that a sentencepiece model is complete; one cut off between two pieces would load.

    Raises:
      UserError: the file is unreadable, truncated or lacks the fields after the pieces.
    """
    try:
        with open(path, "rb") as f:
            data = f.read()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if not data.startswith(b"\n"):
        return  # not a sentencepiece file
    at, seen = 0, set()
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 != LENGTH_DELIMITED:
            raise UserError(f"{path} cannot be read: a damaged sentencepiece model")
        size, at = _varint(data, at)
        at += size
        seen.add(tag >> 3)
    if at != len(data) or not {PIECES, TRAINER, NORMALIZER} <= seen:
        raise UserError(
            f"{path} is cut short: the end of the sentencepiece model is missing"
        )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint (seven bits per byte) and its end; bytes past the end count as 0."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128 or shift > 63:
            break
    return value, at
