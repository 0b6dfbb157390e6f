"""Read text in UTF-8; atomic writes: a file or directory appears complete, or not at all."""

import fcntl
import glob
import json
import math
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from medusa_jax.errors import UserError

if TYPE_CHECKING:  # `--help` and bad flags need no NumPy
    import numpy as np

# A JSON object.
Json = dict[str, Any]
# Characters that may be a number beyond all floats.
LONG = re.compile(r"[0-9]{200}|[0-9][eE]\+?[0-9]{3}")
# Most lists and objects inside each other: code that walks through a value may recurse.
MOST_NESTED = 100
# Most characters of a file's name that its temporary directory's has.
LONGEST = 200


@contextmanager
def replacing(path: str | Path) -> Iterator[str]:
    """Yield a temporary path; the file or directory written there is renamed to `path`.

        with replacing("log.jsonl") as new:
            shutil.copy("old.jsonl", new)   # log.jsonl.k3v0x2ab.new/log.jsonl
        # log.jsonl is complete; a kill before this line leaves the old file

    The path is in a new directory next to `path` that only this user can enter, so nobody's file is
    overwritten and no link is followed. Makes missing parents; removes what killed attempts left first. A file
    replaces an older one, also through a link. An existing empty directory, perhaps a mount point, is filled. A
    directory with files, and what is no file, such as /dev/stdout, is written to directly.

    Raises:
      UserError: the disk is full or `path` is not writable; `path` is unchanged.
    """
    target = os.path.realpath(path)
    name = os.path.basename(target)
    try:
        fill = os.path.isdir(target) and not os.listdir(target)
        if os.path.exists(target) and not (fill or os.path.isfile(target)):
            yield target
            return
        with _private_folder(os.path.join(target, name) if fill else target) as folder:
            new = os.path.join(folder, name)
            yield new
            if not fill:
                _rename(new, target)
            for part in os.listdir(new) if fill else ():
                _rename(os.path.join(new, part), os.path.join(target, part))
    # safetensors wraps errors of the system in its own type.
    except Exception as error:
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise UserError(f"{path} could not be written: {error}") from error
        raise


@contextmanager
def _private_folder(target: str) -> Iterator[str]:
    """A new directory next to a path, removed at the end. It is locked while its process lives."""
    parent, name = os.path.split(target)
    remove_abandoned(glob.escape(target))
    os.makedirs(parent, exist_ok=True)
    folder = tempfile.mkdtemp(".new", f"{name[:LONGEST]}.", parent)
    try:
        with _opened(folder, os.O_DIRECTORY) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(target: str) -> None:
    """Remove what killed processes have left of files that they wrote with `replacing`.

    Args:
      target: the paths of the files, as a pattern of `glob`.
    """
    for left in glob.glob(f"{target}.*.new"):
        with suppress(OSError), _opened(left, os.O_DIRECTORY | os.O_NOFOLLOW) as file:
            own = os.fstat(file).st_uid == os.getuid()
            inside = [name[:LONGEST] for name in os.listdir(left)]
            # An empty one may belong to a process that has not locked it yet.
            if own and inside == [os.path.basename(left).rsplit(".", 2)[0]]:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)


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
    with _opened(path) as file:
        os.fsync(file)


@contextmanager
def _opened(path: str, how: int = 0) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | how)
    try:
        yield file
    finally:
        os.close(file)


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
      name: of the file in messages.

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


def write_json(path: str | Path, value: object, indent: int | None = 2) -> None:
    """Write a JSON file with non-ASCII characters escaped."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def parse_json(text: str, **more: Any) -> Any:
    """As `json.loads`, but JSON has no largest number and no largest depth.

    Raises:
      ValueError: no JSON, a number that no float holds, or nested too deeply.
    """
    if LONG.search(text):
        more |= {"parse_int": partial(_finite, int), "parse_float": partial(_finite, float)}
    with suppress(RecursionError):
        value = json.loads(text, **more)
        level = [value]
        for _ in range(MOST_NESTED + 1):
            level = [x for one in level for x in _inside(one)]
            if not level:
                return value
    raise ValueError(f"it is nested more than {MOST_NESTED} deep")


def _inside(value: Any) -> Iterable[Any]:
    value = value.values() if isinstance(value, dict) else value
    return () if isinstance(value, str | int | float | None) else value


def _finite(kind: type[int | float], digits: str) -> int | float:
    with suppress(OverflowError):
        if math.isfinite(number := kind(digits)):
            return number
    raise ValueError(f"a number of {len(digits)} digits, {digits[:9]}..., is too large")


def write_array(path: str | Path, array: "np.ndarray") -> None:
    """Write a NumPy file."""
    import numpy as np

    with replacing(path) as new, open(new, "wb") as file:
        # Without the file's number, NumPy writes piece by piece, and errors keep the system's reason.
        np.save(SimpleNamespace(write=file.write), array)


def read_array(path: str | Path, mmap_mode: Literal["r"] | None = None) -> "np.ndarray":
    """Read or memory-map a NumPy file.

    Raises:
      UserError: no such file, or it has no array.
    """
    import numpy as np

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
