"""Files that are there whole or not at all: written beside their place, then put into it."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.errors import UserError


@contextmanager
def replacing(path: str | Path) -> Iterator[str]:
    """A name beside `path` to write a file or directory under, which becomes `path` at the end.

        with replacing("log.jsonl") as new:
            shutil.copy("old.jsonl", new)   # log.jsonl.new
        # log.jsonl is all of it; a kill before this line leaves what was there before

    What a killed attempt left under that name is removed first. A file takes the place of an older
    one, behind a link too, a directory only that of an empty one; what is neither, as /dev/stdout,
    is written itself.

    Raises:
      UserError: the disk is full or the place cannot be written; `path` is as it was.
    """
    place = os.path.realpath(path)
    plain = os.path.isfile(place) or os.path.isdir(place) or not os.path.exists(place)
    new = f"{place}.new" if plain else place
    try:
        if plain:
            _remove(new)
        yield new
        if plain:
            _put(new, place)
    except BaseException as error:
        if plain:
            _remove(new)
        # safetensors has an error of its own for what the system says.
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise UserError(f"{path} could not be written: {error}") from error
        raise


def _put(new: str, place: str) -> None:
    """On the disk first, under its name then: after a power cut, too, it is whole."""
    if os.path.isfile(new):
        with open(new, "rb+") as file:
            os.fsync(file.fileno())
    os.replace(new, place)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.exists(path):
        os.remove(path)


def write_text(path: str | Path, text: str) -> None:
    """A text file in UTF-8."""
    with replacing(path) as new, open(new, "w", encoding="utf-8") as file:
        file.write(text)


def write_json(path: str | Path, value: Any, indent: int | None = 1) -> None:
    """A JSON file; characters beyond ASCII escaped, so that any text can be in it."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def write_array(path: str | Path, array: np.ndarray) -> None:
    """A NumPy file."""
    with replacing(path) as new, open(new, "wb") as file:
        np.save(file, array)
