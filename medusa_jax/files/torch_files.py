"""Read torch's .bin and .pt files without torch and without trusting them.

A file is a zip archive of `<root>/data.pkl`, a pickle whose tensors refer to storages, and `<root>/data/<key>`,
the raw bytes of each storage. A pickle is a program: only the opcodes and names are allowed that torch writes for a
dictionary of tensors, the names stand for functions here, and every view must be within the stored bytes.
"""

import functools
import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np

from medusa_jax.errors import UserError, first_line
from medusa_jax.files.tensor import Index, Tensor, Tensors

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


class _Storage(NamedTuple):
    dtype: np.dtype
    key: str
    size: int


class _View(NamedTuple):
    """A tensor: a strided view of a storage, in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Dict(dict[str, Any]):
    """A dictionary of the pickle. Python overflows the C stack when it hashes deeply nested tuples."""

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise ValueError("a dictionary has keys that are not text")
        super().__setitem__(key, value)


def _view(
    storage: object, offset: object, size: object, stride: object, *ignored: object
) -> _View:
    """torch._utils._rebuild_tensor_v2(storage, offset, size, stride, grad, hooks, metadata)."""
    [start], shape, strides = _counts((offset,)), _counts(size), _counts(stride)
    n = math.prod(shape)
    if type(storage) is not _Storage or len(shape) != len(strides):
        raise ValueError("malformed tensor")
    if n > storage.size or (not n and math.prod(i for i in shape if i) > MAX_EMPTY):
        raise ValueError("a tensor with more elements than its storage")
    if not n:
        return _View(storage, 0, shape, (0,) * len(shape))
    # The stride of an axis with one element is unused and may be any number.
    steps = tuple(step if n > 1 else 0 for n, step in zip(shape, strides))
    if start + sum((n - 1) * step for n, step in zip(shape, steps)) >= storage.size:
        raise ValueError("a tensor that reaches beyond its storage")
    return _View(storage, start, shape, steps)


def _counts(value: object) -> tuple[int, ...]:
    """A sequence of whole numbers from 0 on."""
    if (
        not isinstance(value, (tuple, list))
        or len(value) > MAX_DIMENSIONS
        or any(type(n) is not int or n < 0 for n in value)
    ):
        raise ValueError("malformed tensor")
    return tuple(value)


def _parameter(data: object, *ignored: object) -> object:
    """torch._utils._rebuild_parameter(data, requires_grad, hooks)."""
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
            raise ValueError(f"it asks for {module}.{name}, which no weights need")
        return ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        """("storage", type, key, device, number of elements)."""
        kind, dtype, key, _, size = pid
        is_valid = type(size) is int and size >= 0 and type(key) is str
        if kind != "storage" or not isinstance(dtype, np.dtype) or not is_valid:
            raise ValueError("malformed storage reference")
        return _Storage(dtype, key, size)

    def load_dictionary(self) -> None:
        self.append(_Dict())

    def load_state(self) -> None:
        """Ignore the attributes that torch sets on a state dictionary."""
        self.stack.pop()
        if not isinstance(self.stack[-1], _Dict):
            raise ValueError("it sets the state of an object")

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
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as file:
                if file.read(1) not in (b"P", pickle.PROTO):  # of an archive, of a pickle
                    raise UserError(f"{path} has no weights in it")
            raise UserError(
                f"{path} is not in torch's zip format (is it from before torch 1.6, or cut short?); "
                "convert it once where torch is installed: torch.save(torch.load(path, "
                "weights_only=True), path)"
            )
        with zipfile.ZipFile(path) as archive:
            return _read_archive(path, archive)
    except (UserError, KeyboardInterrupt):
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a malformed archive or pickle may raise nearly anything
        raise UserError(f"{path} is refused or damaged: {first_line(error)}") from error


def _read_archive(path: str, archive: zipfile.ZipFile) -> Tensors:
    members = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in members if name.split("/")[1:] == ["data.pkl"]]
    if len(pickles) != 1 or len(members) != len(archive.infolist()):
        raise ValueError("it does not hold exactly one data.pkl")
    root = pickles[0].split("/")[0]
    if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
        raise ValueError("it holds compressed members, which torch never writes")
    if members[pickles[0]].file_size > MAX_PICKLE_BYTES:
        raise ValueError(f"its data.pkl is larger than {MAX_PICKLE_BYTES >> 20} MiB")
    order = f"{root}/byteorder"
    if order in members and archive.read(order).strip() != b"little":
        raise ValueError("it was written on a big-endian machine")
    tree = _Unpickler(io.BytesIO(archive.read(pickles[0]))).load()
    if not isinstance(tree, _Dict):
        raise ValueError("it holds no dictionary of tensors")
    file = np.memmap(path, np.uint8, "r")

    @functools.cache
    def read(member: str) -> np.ndarray:
        """The bytes of a storage; only the first call verifies their checksum, since tensors are read in parts."""
        info = members[member]
        # After a header of 30 bytes, whose end has the lengths of the name and the extra field that follow.
        begin = info.header_offset + 30
        begin += sum(struct.unpack("<HH", file[begin - 4 : begin].tobytes()))
        data = file[begin : begin + info.file_size]
        if data.size < info.file_size or zlib.crc32(data.data) != info.CRC:
            raise UserError(f"{path} is damaged: Bad CRC-32 of {member}")
        return data

    tensors: Tensors = {}
    for name, view in tree.items():
        if not isinstance(view, _View):
            raise ValueError(f"entry {name[:80]!r} is not a tensor")
        member = f"{root}/data/{view.storage.key}"
        size = members[member].file_size if member in members else -1
        if view.storage.size * view.storage.dtype.itemsize > size:
            raise ValueError(f"the bytes of {name!r} are missing or cut short")
        archive.open(member).close()  # checks the place of the bytes
        tensors[name] = _tensor(path, name, view, functools.partial(read, member))
    return tensors


def _tensor(path: str, name: str, view: _View, stored: Callable[[], np.ndarray]) -> Tensor:
    kind = view.storage.dtype

    def read(index: Index) -> np.ndarray:
        if not math.prod(view.shape):
            return np.empty(view.shape, kind)[index]
        flat = np.frombuffer(stored(), kind, view.storage.size)[view.offset :]
        steps = [step * kind.itemsize for step in view.strides]
        # Safe: `_view` has checked that the last element is within the storage.
        array = np.lib.stride_tricks.as_strided(flat, view.shape, steps, writeable=False)
        return np.array(array[index])

    return Tensor(path, view.shape, kind.name, read, name=name)
