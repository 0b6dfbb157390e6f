"""Read torch's .bin and .pt files without torch and without trusting them.

A file is a zip archive of `<root>/data.pkl`, a pickle whose tensors refer to storages, and `<root>/data/<key>`,
the raw bytes of each storage. A pickle is a program: only the opcodes and names are allowed that torch writes for a
dictionary of tensors, the names stand for functions here, and every view must be within the stored bytes.
"""

import io
import math
import os
import pickle
import struct
import zipfile
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.interop.tensor import Index, Tensor, Tensors

MAX_PICKLE_BYTES = 64 << 20
MAX_DIMENSIONS = 8
# Most elements of an empty tensor's nonzero axes: NumPy counts bytes in 64 bits.
MAX_EMPTY = 2**59

STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
# The opcodes that torch.save writes for dictionaries of tensors; none of them makes an object of a class.
OPCODES = """
    PROTO FRAME STOP MARK TUPLE EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM
    SETITEMS NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8
    BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID
"""


class _Refused(Exception):
    """The reason to refuse a file; becomes a UserError that names the file."""


@dataclass(frozen=True)
class _Storage:
    dtype: np.dtype
    key: str
    size: int


@dataclass(frozen=True)
class _View:
    """A tensor: a strided view of a storage, in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Dict(dict[str, Any]):
    """A dictionary of the pickle. Python overflows the C stack when it hashes deeply nested tuples."""

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise _Refused("a dictionary has keys that are not text")
        super().__setitem__(key, value)


def _view(
    storage: object, offset: object, size: object, stride: object, *ignored: object
) -> _View:
    """torch._utils._rebuild_tensor_v2(storage, offset, size, stride, grad, hooks, metadata)."""
    [start], shape, strides = _counts((offset,)), _counts(size), _counts(stride)
    if not isinstance(storage, _Storage):
        raise _Refused("malformed tensor")
    if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise _Refused("a tensor whose shape and strides do not fit")
    if math.prod(shape) > storage.size:
        raise _Refused("a tensor with more elements than its storage")
    if not math.prod(shape):
        if math.prod(n for n in shape if n) > MAX_EMPTY:
            raise _Refused("an empty tensor of an absurd shape")
        return _View(storage, 0, shape, (0,) * len(shape))
    # The stride of an axis with one element is unused and may be any number.
    steps = tuple(step if n > 1 else 0 for n, step in zip(shape, strides))
    if start + sum((n - 1) * step for n, step in zip(shape, steps)) >= storage.size:
        raise _Refused("a tensor that reaches beyond its storage")
    return _View(storage, start, shape, steps)


def _counts(value: object) -> tuple[int, ...]:
    """A sequence of whole numbers from 0 on."""
    if not isinstance(value, (tuple, list)) or any(
        type(n) is not int or n < 0 for n in value
    ):
        raise _Refused("malformed tensor")
    return tuple(value)


def _parameter(data: object, *ignored: object) -> _View:
    """torch._utils._rebuild_parameter(data, requires_grad, hooks)."""
    if not isinstance(data, _View):
        raise _Refused("malformed parameter")
    return data


ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): lambda: _Dict(),
    ("torch._utils", "_rebuild_tensor_v2"): _view,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
}


_PYTHON: Any = pickle._Unpickler
_CODES = [getattr(pickle, name)[0] for name in OPCODES.split()]


class _Unpickler(_PYTHON):  # type: ignore[misc]
    """Python's unpickler in Python, with these opcodes and names alone."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise _Refused(f"it asks for {module}.{name}, which no weights need")
        return ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        """("storage", type, key, device, number of elements)."""
        kind, dtype, key, _, size = pid
        if kind != "storage" or type(size) is not int or size < 0:
            raise _Refused("malformed storage reference")
        if not isinstance(dtype, np.dtype) or not isinstance(key, str):
            raise _Refused("malformed storage reference")
        return _Storage(dtype, key, size)

    def load_dictionary(self) -> None:
        self.append(_Dict())

    def load_state(self) -> None:
        """Ignore the attributes that torch sets on a state dictionary."""
        self.stack.pop()
        if not isinstance(self.stack[-1], _Dict):
            raise _Refused("it sets the state of an object")

    dispatch: ClassVar = {code: _PYTHON.dispatch[code] for code in _CODES} | {
        pickle.EMPTY_DICT[0]: load_dictionary,
        pickle.BUILD[0]: load_state,
    }


def open_torch(path: str) -> Tensors:
    """Open a zip-format torch file with a flat dictionary; tensors are read later.

    Raises:
      UserError: the file is unreadable, in the format before torch 1.6, or has anything but tensors under string
        keys.
    """
    try:
        return _open(path)
    except _Refused as error:
        raise UserError(f"{path} is refused: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _open(path: str) -> Tensors:
    if not zipfile.is_zipfile(path):
        raise UserError(
            f"{path} is not in torch's zip format (is it from before torch 1.6, or cut short?); "
            "convert it once where torch is installed: torch.save(torch.load(path, "
            "weights_only=True), path)"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_archive(path, archive)
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        struct.error,
        EOFError,  # a directory that claims more bytes than the file has
        ValueError,
    ) as error:
        raise _Refused(f"a damaged archive ({str(error)[:200]!r})") from error


def _read_archive(path: str, archive: zipfile.ZipFile) -> Tensors:
    members = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in members if name.split("/")[1:] == ["data.pkl"]]
    if len(pickles) != 1 or len(members) != len(archive.infolist()):
        raise _Refused("it does not hold exactly one data.pkl")
    root = pickles[0].split("/")[0]
    if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
        raise _Refused("it holds compressed members, which torch never writes")
    if members[pickles[0]].file_size > MAX_PICKLE_BYTES:
        raise _Refused(f"its data.pkl is larger than {MAX_PICKLE_BYTES >> 20} MiB")
    order = f"{root}/byteorder"
    if order in members and archive.read(order).strip() != b"little":
        raise _Refused("it was written on a big-endian machine")
    tree = _unpickle(archive.read(pickles[0]))
    tensors: Tensors = {}
    starts: dict[str, int] = {}
    for name, view in tree.items():
        if not isinstance(view, _View):
            raise _Refused(f"entry {name[:80]!r} is not a tensor")
        member = f"{root}/data/{view.storage.key}"
        if member not in members:
            raise _Refused(f"the bytes of {name!r} are missing")
        if view.storage.size * view.storage.dtype.itemsize > members[member].file_size:
            raise _Refused(f"the bytes of {name!r} are cut short")
        if member not in starts:
            starts[member] = _start_of_data(path, members[member])
        tensors[name] = _tensor(path, name, view, starts[member])
    return tensors


def _unpickle(data: bytes) -> dict[str, Any]:
    """The pickle's dictionary of `_View`s."""
    try:
        tree = _Unpickler(io.BytesIO(data)).load()
    except _Refused:
        raise
    except Exception as error:  # a malformed pickle may raise nearly anything
        raise _Refused(f"a malformed pickle ({type(error).__name__})") from error
    if not isinstance(tree, dict):
        raise _Refused("it holds no dictionary of tensors")
    return tree


def _start_of_data(path: str, info: zipfile.ZipInfo) -> int:
    """The offset of a member's bytes, after its local header of variable size."""
    with open(path, "rb") as f:
        f.seek(info.header_offset)
        header = f.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise _Refused("a damaged archive (bad local header)")
        name_size, extra_size = struct.unpack("<HH", header[26:30])
        start = info.header_offset + 30 + name_size + extra_size
        if start + info.file_size > os.fstat(f.fileno()).st_size:
            raise _Refused("a damaged archive (a member reaches beyond the file)")
    return start


def _tensor(path: str, name: str, view: _View, start: int) -> Tensor:
    storage = view.storage

    def read(index: Index) -> np.ndarray:
        if not math.prod(view.shape):
            return np.empty(view.shape, storage.dtype)[index]
        raw = np.memmap(
            path, np.uint8, "r", start, (storage.size * storage.dtype.itemsize,)
        )
        flat = raw.view(storage.dtype)[view.offset :]
        steps = [step * storage.dtype.itemsize for step in view.strides]
        # Safe: `_view` has checked that the last element is within the storage.
        whole = np.lib.stride_tricks.as_strided(flat, view.shape, steps, writeable=False)
        return np.array(whole[index])

    return Tensor(path, view.shape, storage.dtype.name, read, name=name)
