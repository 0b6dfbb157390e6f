"""Cache trees of arrays on disk and memory-map them at later starts.

A file is a magic number, the place and checksum of the header, the arrays, and the header: the tree in JSON, and the
arrays' types and places. Arrays are aligned, so that XLA on a CPU reads them in place.
"""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import jax
import jaxlib
import numpy as np

from medusa_jax.cache_directories import cache_directory
from medusa_jax.console import inform, timed
from medusa_jax.devices.machine import processor
from medusa_jax.errors import UserError
from medusa_jax.whole_files import read_text, remove_abandoned, replacing, write_text

# Most gigabytes of a kind of files; the least recently used make room.
LIMIT, GIGABYTES = "MEDUSA_JAX_CACHE_LIMIT", 20.0
START, MAGIC, ALIGNED = struct.Struct("<8sQ32s"), b"medusa 1", 64
# Files of a smaller model are converted quickly.
LEAST_BYTES = 2**21
PACKAGE = Path(__file__).parent
# Raised for files that are missing or damaged.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, struct.error, RuntimeError)
Made = TypeVar("Made")


def made_once(
    what: str, files: Collection[str], marks: Any, make: Callable[[], Made]
) -> Made:
    """Return `make()`; if an earlier start made it from the same files and marks, read it from the cache.

    Args:
      what: its name, for people and in its key.
      files: files of weights, found by their content.
      marks: all else that it depends on, as for `cached`.
    """
    try:
        if sum(map(os.path.getsize, files)) < LEAST_BYTES:
            return make()
        path = cached("packed", what, sorted(map(sha256_of, files)), marks)
    except (OSError, TypeError):
        return make()
    with suppress(*UNREADABLE):
        made: Made = read(path)
        return made
    with timed(f"packing {what} for this processor, once"):
        made = make()
    write(path, made, f"{what}, packed for this processor,")
    return made


def cached(kind: str, *marks: Any) -> Path:
    """The file in the user's cache for what depends on these marks, this package and this machine.

    Raises:
      TypeError: a mark has objects that are not plain data or this package's.
    """
    settings = {
        k: v for k, v in os.environ.items() if k.startswith(("JAX_", "XLA_", "MEDUSA_"))
    }
    settings.pop(LIMIT, None)
    x64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    versions = jax.__version__, jaxlib.__version__, sys.version
    machine = *versions, processor(), os.cpu_count(), x64
    parts = plain([*machine, package_mark(), settings, *marks])
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return Path(cache_directory(kind)) / digest[:32]


@functools.cache
def package_mark() -> str:
    """Names, sizes and times of the package's sources."""
    sources = sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".cc", ".h"))
    marks = [(str(p), (status := p.stat()).st_size, status.st_mtime_ns) for p in sources]
    return hashlib.sha256(repr(marks).encode()).hexdigest()


def sha256_of(name: str) -> str:
    """The sha256 of a file, noted for later starts: gigabytes take seconds to read."""
    status = os.stat(name)
    marks = os.path.realpath(name), status.st_size, status.st_mtime_ns, status.st_ctime_ns
    key = hashlib.sha256(repr((*marks, status.st_ino)).encode()).hexdigest()[:24]
    note = os.path.join(cache_directory("gguf"), f"{key}.sha256")
    with suppress(UserError):
        return read_text(note)
    with open(name, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # A new file may change again within the resolution of its times.
    if time.time() - status.st_ctime > 2:
        with suppress(UserError):
            write_text(note, digest)
    return digest


def read(path: Path) -> Any:
    """Map a tree that `write` has written.

    Raises: one of `UNREADABLE`: there is none, or it is damaged.
    """
    data = np.memmap(path, np.uint8, "r").view(np.ndarray)
    magic, place, checksum = START.unpack(data[: START.size].tobytes())
    header = data[place:].tobytes()
    if magic != MAGIC or hashlib.sha256(header).digest() != checksum:
        raise ValueError(f"{path} is damaged")
    tree, places = json.loads(header)
    arrays = []
    for name, shape, start in places:
        kind = np.dtype(name)
        end = start + kind.itemsize * int(np.prod(shape))
        arrays.append(data[start:end].view(kind).reshape(shape))
    os.utime(path)  # used last
    return rebuilt(tree, jax.device_put(arrays, may_alias=True))


def write(path: Path, tree: Any, what: str = "") -> None:
    """Write a tree in another thread; if that fails, it is made again next time.

    Args:
      what: said with the file's size if it is large.
    """
    found: dict[int, Any] = {}
    with suppress(OSError, TypeError):
        header = [plain(tree, found), places := []]
        arrays, at = [np.asarray(x) for x in found.values()], ALIGNED
        for x in arrays:
            places.append((x.dtype.name, x.shape, at))
            at += -(-x.nbytes // ALIGNED) * ALIGNED
        if not make_room(path.parent, at):
            return
        if what and at > LEAST_BYTES:
            inform(f"writing {at / 1e6:.0f} MB of {what} to {path.parent}, once")
        arguments = path, arrays, places, at, json.dumps(header).encode()
        threading.Thread(target=_write, args=arguments).start()


def _write(
    path: Path, arrays: list[Any], places: list[Any], at: int, header: bytes
) -> None:
    with suppress(UserError), replacing(path) as new, open(new, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(START.pack(MAGIC, at, hashlib.sha256(header).digest()))
        for x, (_, _, start) in zip(arrays, places):
            file.seek(start)
            file.write(x.reshape(-1).view(np.uint8))
        file.seek(at)
        file.write(header)


def make_room(directory: Path, size: int) -> bool:
    """Whether a file of this size is within the limit and half of the free disk.

    Those that were used least recently make room for it.
    """
    try:
        most = float(os.environ.get(LIMIT) or GIGABYTES) * 1e9
    except ValueError:
        most = -1.0
    if not most >= 0:  # or nan
        given = os.environ[LIMIT]
        raise UserError(f"{LIMIT} is a number of gigabytes, at least 0, not {given!r}")
    if size > min(most, shutil.disk_usage(directory).free / 2):
        return False
    remove_abandoned(f"{directory}/*")
    files = kept_files(directory)
    while files and size > most - sum(bytes for _, bytes, _ in files):
        files.pop(0)[2].unlink(missing_ok=True)
    return True


def kept_files(directory: Path) -> list[tuple[int, int, Path]]:
    """Times of last use, sizes and paths of a cache's files, by time."""
    files = []
    for path in directory.iterdir():
        with suppress(OSError):  # another process may remove it
            if stat.S_ISREG((status := path.stat()).st_mode):
                files.append((status.st_mtime_ns, status.st_size, path))
    return sorted(files)


def plain(x: Any, arrays: dict[int, Any] | None = None) -> Any:
    """A tree in JSON, its arrays as numbers and added to `arrays`; with None, arrays are refused."""
    if x is None or type(x) in (bool, int, float, str):
        return x
    if arrays is not None and isinstance(x, np.ndarray | jax.Array):
        arrays.setdefault(id(x), x)  # a tied LM head is the embedding
        return {"array": list(arrays).index(id(x))}
    if type(x) is dict and all(type(key) is str for key in x):
        return {"dict": {key: plain(value, arrays) for key, value in x.items()}}
    if type(x) in (tuple, list):
        return {type(x).__name__: [plain(value, arrays) for value in x]}
    if arrays is None and isinstance(x, np.dtype | jax.sharding.Mesh):
        return str(x)
    kind = type(x)
    if not kind.__module__.startswith("medusa_jax."):
        raise TypeError(f"{kind} is not this package's")
    names = getattr(x, "_fields", None) or [field.name for field in dataclasses.fields(x)]
    # Flax modules have a place in a tree of modules, too.
    fields = {name: getattr(x, name) for name in names if name not in ("parent", "name")}
    named = f"{kind.__module__}:{kind.__qualname__}"
    return {named: {name: plain(value, arrays) for name, value in fields.items()}}


def rebuilt(x: Any, arrays: Sequence[jax.Array] = ()) -> Any:
    """The inverse of `plain`."""
    if not isinstance(x, dict):
        return x
    [(kind, inside)] = x.items()
    if kind == "array":
        return arrays[inside]
    if kind in ("tuple", "list"):
        values = [rebuilt(value, arrays) for value in inside]
        return values if kind == "list" else tuple(values)
    fields = {name: rebuilt(value, arrays) for name, value in inside.items()}
    if kind == "dict":
        return fields
    module, _, name = kind.partition(":")
    made = vars(sys.modules[module])[name]
    if not module.startswith("medusa_jax.") or not isinstance(made, type):
        raise ValueError(f"{kind} is no class of this package")
    return made(**fields)
