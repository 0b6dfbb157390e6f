"""Damaged GGUF files: always one clear error, and soon."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_files import byte_level_metadata, gguf, llama_tensors, shape_metadata, write

from medusa_jax.errors import UserError
from medusa_jax.formats.gguf.convert import _convert
from medusa_jax.formats.gguf.reader import read_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory, byte_level_dir):
    """(a good file, where its tensors begin, a path for damaged ones, a folder to convert into)."""
    folder = tmp_path_factory.mktemp("damaged")
    metadata = byte_level_metadata((byte_level_dir / "tokenizer.json").read_text())
    tensors = llama_tensors(len(metadata["tokenizer.ggml.tokens"]))
    path = write(folder / "good.gguf", metadata | shape_metadata("llama"), tensors)
    file = read_gguf(path)
    stored = sum(tensor.blocks.size for tensor in file.tensors.values())
    with open(path, "rb") as f:
        data = f.read()
    (folder / "out").mkdir()
    _convert(path, None, str(folder / "out"))
    return data, len(data) - stored, folder / "damaged.gguf", str(folder / "out")


def convert(data, path, out):
    path.unlink(missing_ok=True)  # the last one may still be mapped
    path.write_bytes(data)
    _convert(str(path), None, out)


@pytest.mark.parametrize(
    ("at", "what", "message"),
    [
        (0, b"GGML", "is no GGUF file: it begins with b'GGML'"),
        (4, struct.pack("<I", 1), "of version 1; versions 2 and 3"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**60), "is truncated or damaged"),
        (16, struct.pack("<Q", 2**60), "is truncated or damaged"),
    ],
)
def test_the_first_bytes(whole, at, what, message):
    data, _, path, out = whole
    with pytest.raises(UserError, match=message):
        convert(data[:at] + what + data[at + len(what) :], path, out)


@pytest.mark.parametrize("shape", [(63, 2), (64, 0)])
def test_a_shape_that_is_not_made_of_blocks(shape, tmp_path):
    tensor = (np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    path = tmp_path / "a.gguf"
    data = Path(write(path, {}, {"x": tensor})).read_bytes()
    right = struct.pack("<QQ", 64, 2)
    assert data.count(right) == 1
    path.write_bytes(data.replace(right, struct.pack("<QQ", *shape)))
    with pytest.raises(UserError, match=r"'x' of shape .* is not made of blocks of 32"):
        read_gguf(str(path))


def test_a_key_or_tensor_that_occurs_twice(whole):
    data, _, path, out = whole
    for first, second, what in (
        (b"blk.0.attn_q.weight", b"blk.0.attn_k.weight", "tensor .* occurs twice"),
        (b"llama.rope.freq_base", b"tokenizer.ggml.model", "key .* occurs twice"),
    ):
        assert len(first) == len(second) and data.count(first) == 1
        assert second in data
        with pytest.raises(UserError, match=what):
            convert(data.replace(first, second), path, out)
