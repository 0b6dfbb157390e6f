"""JSON files of models, read with errors that name the file."""

import os

from medusa_jax.errors import UserError
from medusa_jax.whole_files import Json, decode_text, parse_json

# Says in place of tokenizer.json why there is none.
REFUSAL = "tokenizer.error"


def read_json(path: str) -> Json:
    """Read a JSON object; a UserError names the file."""
    try:
        with open(path, "rb") as f:
            value = parse_json(decode_text(f.read()))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object, not a {type(value).__name__}")
    return value


def optional_json(path: str) -> Json:
    """`read_json`; {} if the file does not exist."""
    return read_json(path) if os.path.isfile(path) else {}
