"""Read text in UTF-8; atomic writes: a file or directory appears complete, or not at all."""

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

# A JSON object.
Json = dict[str, Any]


@contextmanager
def replacing(path: str | Path) -> Iterator[str]:
    """Yield a temporary path next to `path`; the file or directory written there is renamed to `path`.

        with replacing("log.jsonl") as new:
            shutil.copy("old.jsonl", new)   # log.jsonl.new
        # log.jsonl is complete; a kill before this line leaves the old file

    Removes the temporary file of a killed attempt first. A file replaces an older one, also through a link; a
    directory replaces only an empty one. Anything else, such as /dev/stdout, is written directly.

    Raises:
      UserError: the disk is full or `path` is not writable; `path` is unchanged.
    """
    target = os.path.realpath(path)
    special = os.path.exists(target) and not (
        os.path.isfile(target) or os.path.isdir(target)
    )
    new = target if special else f"{target}.new"
    try:
        if not special:
            _remove(new)
        yield new
        if not special:
            _rename(new, target)
    except BaseException as error:
        if not special:
            _remove(new)
        # safetensors wraps errors of the system in its own type.
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise UserError(f"{path} could not be written: {error}") from error
        raise


def _rename(new: str, target: str) -> None:
    """Sync, then rename, so that `target` is complete even after a power cut."""
    if os.path.isfile(new):
        _sync(new)
    for folder, _, names in os.walk(new):
        for name in names:
            _sync(os.path.join(folder, name))
        with suppress(OSError):  # some file systems cannot sync directories
            _sync(folder)
    os.replace(new, target)
    with suppress(OSError):
        _sync(os.path.dirname(target))


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


def decode_text(data: bytes | bytearray) -> str:
    """UTF-8 as text with line breaks as \\n, without byte order marks at its start.

    Raises:
      UnicodeDecodeError: another encoding; its `reason` gives the line.
    """
    utf_16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        if utf_16 or 0 in data:  # text has no zero bytes, UTF-16 without its mark has
            at = 0 if utf_16 else data.index(0)
            reason = "UTF-16" if utf_16 else "a zero byte"
            raise UnicodeDecodeError("utf-8", data, at, at + 1, reason)
        text = data.decode().lstrip("\ufeff")
    except UnicodeDecodeError as error:
        error.reason += f" in line {data.count(10, 0, error.start) + 1}"
        raise
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_text(path: str | Path, name: str = "") -> str:
    """Read a text file by `decode_text`.

    Args:
      name: what messages call the file.

    Raises:
      UserError: not readable, or not UTF-8.
    """
    try:
        return decode_text(Path(path).read_bytes())
    except UnicodeDecodeError as error:
        raise UserError(
            f"cannot read {name or path}: not UTF-8 ({error.reason})"
        ) from error
    except (OSError, ValueError) as error:  # of names with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {name or path}: {reason}") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8."""
    with replacing(path) as new, open(new, "w", encoding="utf-8") as file:
        file.write(text)


def write_json(path: str | Path, value: object, indent: int | None = 1) -> None:
    """Write a JSON file with non-ASCII characters escaped."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def write_array(path: str | Path, array: np.ndarray) -> None:
    """Write a NumPy file."""
    with replacing(path) as new, open(new, "wb") as file:
        np.save(file, array)


def read_array(path: str | Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
    """Read or memory-map a NumPy file.

    Raises:
      UserError: no such file, or it has no array.
    """
    try:
        array = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive of several arrays")
        return array
    except Exception as error:  # NumPy raises many types for damaged headers
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
