"""Read GGUF files: metadata, and tensors in blocks that are unpacked when they are read.

The header is read here, since `gguf.GGUFReader` reads past the end of a truncated file (a damaged length of an array
keeps it busy for ever) and takes four seconds for a vocabulary of 49,152. The `gguf` package knows the block types.

Layout (version 2 and 3): magic, version, number of tensors, number of metadata entries; entries of
key, type and value; for each tensor name, dimensions (the fastest first), block type and offset;
the tensors, aligned.
"""

import functools
import itertools
import math
import re
import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any

import numpy as np

from medusa_jax.errors import UserError, first_line
from medusa_jax.typed import Fields

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
    10: "Q",
    11: "q",
    12: "d",
}
FLOAT32, STRING, ARRAY = 6, 8, 9
LENGTH = struct.Struct("<Q")
MOST_DIMENSIONS = 4
# The end of the name of a split model's file.
PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)


@dataclass(frozen=True)
class BlockTensor:
    """A tensor as it is stored in the file.

    Attributes:
      shape: the slowest dimension first, as NumPy and Hugging Face files have it.
      kind: its block type, a `gguf.GGMLQuantizationType`.
      blocks: its bytes, one row of the tensor a row, mapped.
      start: where they begin in the file.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    kind: Any
    blocks: np.ndarray
    start: int

    def read(self) -> np.ndarray:
        """The blocks, read instead of mapped: mapped pages count as this process's memory."""
        try:
            flat = np.fromfile(self.file, np.uint8, self.blocks.size, offset=self.start)
            return flat.reshape(self.blocks.shape)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.file} changed while it was read: {error}") from error

    def unpacked(self) -> np.ndarray:
        """The values in float32.

        Raises:
          UserError: some are not finite.
        """
        return self._unpack(self.read()).reshape(self.shape)

    def unpacked_rows(self, rows: Any) -> np.ndarray:
        """`unpacked` of some rows of a matrix, a slice or an array of their numbers."""
        return self._unpack(self.read()[rows]).reshape(-1, self.shape[-1])

    def _unpack(self, blocks: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # a damaged scale overflows
            values = _package().dequantize(blocks, self.kind)
        if not np.isfinite(values).all():
            raise UserError(
                f"{self.file} is damaged: tensor {self.name!r} contains NaN or infinity"
            )
        return values.astype(np.float32, copy=False)


@dataclass(frozen=True)
class GGUFFile(Fields):
    """A file's metadata by key, and its tensors by name."""

    tensors: dict[str, BlockTensor]

    whole = partialmethod(Fields.count, least=0)

    def per_layer(self, name: str, layers: int, default: int | None = None) -> int:
        """A count that may be a list with an entry for each layer, which must all be equal."""
        value = self.values.get(name)
        if not isinstance(value, list):
            return self.count(name, default)
        if len(value) != layers or len({*value}) != 1:
            self.refuse(name, f"a number, the same for all {layers} layers")
        return replace(self, values={name: value[0]}).count(name)


def split_files(path: str) -> list[str]:
    """The files of a model by the path of any of them; [path] unless it is split.

    Raises:
      UserError: as for `read_gguf`.
    """
    name = PART.search(path)
    if name is None or _read(path).whole("split.count", 1) < 2:
        return [path]
    count = int(name[2])
    return [PART.sub(rf"-{i:05}-of-\2\3", path) for i in range(1, count + 1)]


def read_gguf(path: str) -> GGUFFile:
    """Read the header of a GGUF file, or of all files of a split model; tensors are mapped into memory.

    Raises:
      UserError: unreadable, truncated or damaged; another version; blocks of a type that the `gguf` package does not
        unpack; a file of a split model is missing or belongs to another model; the package is not installed.
    """
    files = split_files(path)
    parts = [_read(file) for file in files]
    tensors: dict[str, BlockTensor] = {}
    for i, part in enumerate(parts):
        place = part.whole("split.no", 0), part.whole("split.count", 1)
        if place != (i, len(files)) and place != (0, 0):
            raise UserError(
                f"{part.file} is file {place[0] + 1} of {place[1]} of a split model, which its name does not "
                "say: it should end in -00001-of-00003.gguf, for example"
            )
        _add(tensors, part.tensors, part.file)
    return GGUFFile(path, parts[0].values, tensors)


def _add(table: dict[str, Any], entries: dict[str, Any], path: str) -> None:
    """Add entries to a table, in which no key may occur twice."""
    if duplicates := sorted(table.keys() & entries.keys()):
        raise UserError(f"{path} is damaged: {duplicates[0]!r} occurs twice")
    table |= entries


def _read(path: str) -> GGUFFile:
    try:
        # Slicing a plain view costs a third of slicing a memmap.
        data = np.memmap(path, np.uint8, "r").view(np.ndarray)
        return _parse(path, data)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is truncated or damaged: {first_line(error)}") from error


def _parse(path: str, data: np.ndarray) -> GGUFFile:
    """Read the bytes of a file; raises ValueError or RecursionError where they are damaged."""
    cursor = _Cursor(data)
    magic, version = bytes(cursor.take(4, "the header")), cursor.scalar("I", "the header")
    # A big-endian file shows its version in the upper bytes.
    if magic != MAGIC or version not in VERSIONS:
        raise UserError(
            f"{path} is not a little-endian GGUF file of version 2 or 3: it begins with {magic!r}, {version}"
        )
    n_tensors, n_entries = (cursor.scalar("Q", "the header") for _ in range(2))
    metadata: dict[str, Any] = {}
    for _ in range(n_entries):
        key = cursor.string("a metadata key")
        _add(metadata, {key: cursor.value(cursor.scalar("I", key), key)}, path)
    tensors = [_describe(cursor) for _ in range(n_tensors)]
    file = GGUFFile(path, metadata, {})
    alignment = file.whole("general.alignment", 32) or 1
    start = -(-cursor.at // alignment) * alignment
    for name, shape, number, offset in tensors:
        tensor = _map_tensor(path, data, name, shape, number, start + offset)
        _add(file.tensors, {name: tensor}, path)
    return file


class _Cursor:
    """A place in the header that never runs over the file's end."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 0

    def take(self, size: int, what: str) -> np.ndarray:
        if size > len(self.data) - self.at:
            raise ValueError(f"it ends inside {what}")
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, code: str, what: str) -> Any:
        data = self.take(struct.calcsize(f"<{code}"), what).tobytes()
        return struct.unpack(f"<{code}", data)[0]

    def string(self, what: str) -> str:
        return self.take(self.scalar("Q", what), what).tobytes().decode()

    def strings(self, count: int, what: str) -> list[str]:
        """Consecutive strings; a vocabulary has a hundred thousand."""
        data = self.data.data  # a view costs a tenth of an array here
        start, ends, at = self.at, [], self.at
        with suppress(struct.error, OverflowError):
            for _ in range(count):
                at += 8 + LENGTH.unpack_from(data, at)[0]
                ends.append(at)
        if len(ends) < count:
            raise ValueError(f"it ends inside {what}")
        block = self.take(at - start, what).tobytes()
        starts = [0, *(end - start for end in ends)]
        return [block[i + 8 : j].decode() for i, j in itertools.pairwise(starts)]

    def value(self, kind: int, key: str) -> Any:
        what = f"the metadata {key!r}"
        if kind not in {*SCALARS, STRING, ARRAY}:
            raise ValueError(f"{what} is of an unknown type, {kind}")
        if kind == STRING:
            return self.string(what)
        if kind == FLOAT32:
            # 1e-05, as its publisher wrote it, instead of 9.999999747378752e-06.
            return float(str(np.float32(self.scalar("f", what))))
        if kind != ARRAY:
            return self.scalar(SCALARS[kind], what)
        of, count = (self.scalar(code, what) for code in "IQ")
        if of == STRING:
            return self.strings(count, what)
        if of not in SCALARS:
            return [self.value(of, key) for _ in range(count)]
        kind_of = np.dtype(SCALARS[of]).newbyteorder("<")
        return self.take(count * kind_of.itemsize, what).view(kind_of).tolist()


def _describe(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, block type, offset) of the next tensor."""
    name = cursor.string("a tensor's name")
    what = f"the description of tensor {name!r}"
    dimensions = cursor.scalar("I", what)
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.scalar("Q", what) for _ in range(dimensions))[::-1]
    return name, shape, cursor.scalar("I", what), cursor.scalar("Q", what)


def _map_tensor(
    path: str, data: np.ndarray, name: str, shape: tuple[int, ...], number: int, start: int
) -> BlockTensor:
    """The tensor whose blocks begin at byte `start`."""
    package = _package()
    if not _can_unpack(number):
        raise UserError(
            f"{path}: tensor {name!r} is stored in blocks of type {number}, which the installed "
            "gguf package does not unpack"
        )
    kind = package.GGMLQuantizationType(number)
    per_block, block_bytes = package.GGML_QUANT_SIZES[kind]
    if shape[-1] % per_block or not math.prod(shape):
        raise ValueError(
            f"tensor {name!r} of shape {list(shape)} is not made of blocks of {per_block} ({kind.name})"
        )
    row = shape[-1] // per_block * block_bytes
    rows = math.prod(shape[:-1])
    if start + rows * row > len(data):
        raise ValueError(f"it ends inside tensor {name!r}")
    blocks = data[start : start + rows * row].reshape(rows, row)
    return BlockTensor(path, name, shape, kind, blocks, start)


@functools.cache
def _can_unpack(number: int) -> bool:
    """Whether the package converts this block type to numbers; tried with one block."""
    package = _package()
    try:
        kind = package.GGMLQuantizationType(number)
        block = np.zeros((1, package.GGML_QUANT_SIZES[kind][1]), np.uint8)
        package.dequantize(block, kind)
    except (ValueError, NotImplementedError):
        return False
    return True


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            "GGUF files need the package gguf: pip install 'medusa-jax[gguf]'"
        ) from error
    return gguf
