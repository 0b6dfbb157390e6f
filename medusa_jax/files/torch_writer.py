"""Write torch's .pt files without torch: a dictionary of contiguous tensors.

The format of `torch.save(state_dict)` since torch 1.6 (read by `torch_files.py`): a zip archive of uncompressed
members, `archive/data.pkl` and one `archive/data/{n}` per tensor. The pickle is written opcode by opcode, since
Python's pickler needs the classes that it names.
"""

import struct
import zipfile

import numpy as np

from medusa_jax.files.torch_files import STORAGES
from medusa_jax.whole_files import replacing

_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}
# Torch aligns the bytes of a storage, so that they can be memory-mapped.
ALIGNMENT = 64


def save_torch(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays so that `torch.load(path, weights_only=True)` gives them as tensors.

    Raises:
      UserError: the disk is full or the directory is not writable; `path` is unchanged.
    """
    arrays = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "archive/data.pkl", _pickle(arrays))
        _add(archive, "archive/byteorder", b"little")
        for n, array in enumerate(arrays.values()):
            _add(archive, f"archive/data/{n}", array.tobytes())
        _add(archive, "archive/version", b"3\n")


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Add an uncompressed member with aligned bytes."""
    info = zipfile.ZipInfo(name)
    assert archive.fp is not None
    # A local header has 30 bytes, the name and an extra field with a header of 4 bytes.
    begin = archive.fp.tell() + 30 + len(name) + 4
    padding = b"Z" * (-begin % ALIGNMENT)
    info.extra = b"FB" + struct.pack("<H", len(padding)) + padding
    archive.writestr(info, content)


def _pickle(arrays: dict[str, np.ndarray]) -> bytes:
    """The dictionary {name: tensor n of storage n}, in pickle protocol 2."""
    items = b"".join(
        _text(name) + _tensor(array, n) for n, (name, array) in enumerate(arrays.items())
    )
    return b"\x80\x02}(" + items + b"u."


def _tensor(array: np.ndarray, n: int) -> bytes:
    """_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)."""
    kind = _name("torch", _STORAGE_OF[array.dtype])
    reference = _tuple(
        _text("storage"), kind, _text(str(n)), _text("cpu"), _number(array.size)
    )
    strides = [step // array.itemsize for step in array.strides]
    arguments = _tuple(
        reference + b"Q",
        _number(0),
        _tuple(*map(_number, array.shape)),
        _tuple(*map(_number, strides)),
        b"\x89",
        _name("collections", "OrderedDict") + b")R",
    )
    return _name("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    if value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
