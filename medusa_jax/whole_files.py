"""Files that are there whole or not at all: written beside their place, then put into it."""

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

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
        _sync(new)
    for folder, _, names in os.walk(new):
        for name in names:
            _sync(os.path.join(folder, name))
        with suppress(OSError):  # some file systems cannot sync directories
            _sync(folder)
    os.replace(new, place)
    with suppress(OSError):
        _sync(os.path.dirname(place))


def _sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


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


def read_array(path: str | Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
    """Read what `write_array` wrote, or map it into memory.

    Raises:
      UserError: no such file, or no array in it.
    """
    try:
        array = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive of several arrays")
        return array
    except Exception as error:  # NumPy raises a dozen types for headers that are damaged
        reason = getattr(error, "strerror", None) or str(error) or repr(error)
        reason = " ".join(reason.split())[:200]
        raise UserError(f"{path} cannot be read: {reason}") from error


def checksum(path: str | Path) -> int:
    """CRC-32 of a file; about 3 GiB/s, without the GIL."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
    return crc
