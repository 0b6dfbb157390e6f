"""A GGUF file with its own weights unpacked to float32, for a fair comparison with llama.cpp."""

import math
import os
from collections import Counter

import filelock
import numpy as np

from medusa_jax.cache_directories import cache_directory
from medusa_jax.console import announced
from medusa_jax.errors import UserError
from medusa_jax.files.gguf.directory import checksum
from medusa_jax.files.gguf.reader import read_gguf, split_files
from medusa_jax.files.known import file_of, named_model, names
from medusa_jax.whole_files import replacing

ARCHITECTURE = "general.architecture"
# What `general.file_type` says of a file whose tensors are all float32.
FILE_TYPE, ALL_F32 = "general.file_type", 0


def gguf_file(path_or_name: str | None) -> str:
    """The GGUF file of a path or a name of `known.KNOWN`.

    Raises:
      UserError: it is not a GGUF file.
    """
    if row := named_model(path_or_name):
        return file_of(row)
    if path_or_name is None or not path_or_name.lower().endswith(".gguf"):
        raise UserError(
            f"{path_or_name or 'the demo'} is not a GGUF file, which llama.cpp needs: give --model "
            f"a .gguf file or a name ({', '.join(names())})"
        )
    return split_files(path_or_name)[0]


def block_type(path: str) -> str:
    """The name of the block type that most weights of the file are stored in, such as Q4_1.

    Raises:
      UserError: as for `read_gguf`.
    """
    weights: Counter[str] = Counter()
    for tensor in read_gguf(path).tensors.values():
        weights[tensor.kind.name] += math.prod(tensor.shape)
    return weights.most_common(1)[0][0]


def as_float32(path: str) -> str:
    """A GGUF file of the same metadata and the same weights in float32, made once.

    It is in the user's cache, named after the file's sha256; it appears when it is complete.

    Raises:
      UserError: a file that cannot be read or is damaged; the disk is full.
    """
    file = os.path.join(cache_directory("gguf"), f"{checksum(path)[:24]}-float32.gguf")
    try:
        with filelock.FileLock(f"{file}.lock"):
            if not os.path.isfile(file):
                with (
                    announced(f"unpacking {path} to float32, once"),
                    replacing(file) as new,
                ):
                    _write(path, new)
    except OSError as error:
        raise UserError(f"{file} could not be written: {error}") from error
    return file


def _write(path: str, out: str) -> None:
    """One tensor after the other, so that the weights are never in memory together."""
    arrays = read_gguf(path)  # the package's own reader below trusts what it reads
    import gguf

    fields = gguf.GGUFReader(split_files(path)[0]).fields.values()
    writer = gguf.GGUFWriter(out, arrays.text(ARCHITECTURE))
    try:
        for field in fields:
            # "GGUF." stands for the header's own numbers; the architecture is written already.
            if field.name == ARCHITECTURE or field.name.startswith(("GGUF.", "split.")):
                continue
            value = ALL_F32 if field.name == FILE_TYPE else field.contents()
            kind, *inner = field.types
            writer.add_key_value(field.name, value, kind, inner[-1] if inner else None)
        for name, tensor in arrays.tensors.items():
            size = 4 * math.prod(tensor.shape)
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), size)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in arrays.tensors.values():
            writer.write_tensor_data(tensor.unpacked())
    finally:
        writer.close()
