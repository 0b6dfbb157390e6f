"""Tokenizers without a tokenizer.json, such as sentencepiece's tokenizer.model."""

import os
from typing import Any

from medusa_jax.errors import UserError, first_line
from medusa_jax.files.json_files import optional_json


def read_backend(directory: str) -> Any:
    """The `tokenizers.Tokenizer` that transformers makes of a directory's files.

    Raises:
      UserError: it cannot.
    """
    # Importing transformers without torch would print a notice.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer, LlamaTokenizer

    config = optional_json(os.path.join(directory, "config.json"))
    settings = optional_json(os.path.join(directory, "tokenizer_config.json"))
    has_class = "model_type" in config or "tokenizer_class" in settings
    loader = AutoTokenizer if has_class else LlamaTokenizer
    try:
        _check_whole(os.path.join(directory, "tokenizer.model"))
        # Without an explicit False, transformers asks on stdin whether to run the model's code.
        backend = loader.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
    except Exception as error:  # anything from a missing class to a malformed protobuf
        problem = f"the tokenizer in {directory} cannot be read: {first_line(error)}"
        raise UserError(problem) from error
    return backend


def _check_whole(path: str) -> None:
    """Raise ValueError if a sentencepiece model lacks its end, which its parser accepts."""
    from transformers.convert_slow_tokenizer import import_protobuf

    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        data = file.read()
    if data.startswith(b"\n"):  # else some other tokenizer's file
        model = import_protobuf().ModelProto.FromString(data)
        if not (model.HasField("trainer_spec") and model.HasField("normalizer_spec")):
            raise ValueError("the end of tokenizer.model is missing")
