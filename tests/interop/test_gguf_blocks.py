"""Tensors of every block type, written here and read back; damaged headers."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_files import byte_level_metadata, gguf, llama_tensors, shape_metadata, write
from refusals import refused

from medusa_jax.formats.gguf.reader import read_gguf
from research.peers import float32

Kind = gguf.GGMLQuantizationType
ROUNDING = {"F32": 0.0, "F16": 2**-12, "BF16": 2**-9, "Q8_0": 0.51 / 254}
ROUNDING |= {"Q5_0": 1.01 / 32, "Q5_1": 0.51 / 31, "Q4_0": 1.01 / 16, "Q4_1": 0.51 / 15}


@pytest.mark.parametrize("name", ROUNDING)
def test_within_the_rounding_of_the_type(name, tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    path = write(tmp_path / "a.gguf", {}, {"x": (values, Kind[name]), "y": values[:, 0]})
    file = read_gguf(path)
    assert file.tensors["x"].shape == (6, 96)
    error = np.abs(file.tensors["x"].unpacked() - values).reshape(-1, 32)
    largest = np.abs(values).reshape(-1, 32).max(1, keepdims=True)
    assert (error <= ROUNDING[name] * 2 * largest).all()
    assert error.max() > 0 or name == "F32"
    np.testing.assert_array_equal(file.tensors["y"].unpacked(), values[:, 0])


def test_every_type_as_transformers_unpacks_it(tmp_path):
    """Random blocks of every type that both know, those left out whose numbers are not finite."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.gguf.dequant")
    rng = np.random.default_rng(0)
    for number in theirs.GGML_BLOCK:
        kind = Kind(number)
        _, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (400, size), np.uint8)
        with np.errstate(all="ignore"):
            finite = np.isfinite(gguf.dequantize(blocks, kind)).all(1)
        blocks = blocks[finite][:64]
        path = write(tmp_path / "a.gguf", {}, {"x": (blocks, kind)})
        ours = read_gguf(path).tensors["x"].unpacked()
        expected = theirs.dequantize(torch.from_numpy(blocks), number).numpy()
        np.testing.assert_allclose(
            ours, expected.reshape(ours.shape), rtol=1e-6, err_msg=kind.name
        )
        assert len(blocks) == 64


def test_a_type_without_numbers_is_refused_by_name(tmp_path):
    path = write(tmp_path / "a.gguf", {}, {"x": np.arange(8, dtype=np.int32)})
    with refused(f"{path}: tensor 'x' .* of type 26, which the"):
        read_gguf(path)


@pytest.fixture
def file(tokenizer_json, tmp_path):
    """A tied llama model in blocks of 8 bits, its norms in float32."""
    metadata = byte_level_metadata(tokenizer_json)
    metadata |= shape_metadata("llama") | {"general.file_type": 7}
    tensors = llama_tensors(len(metadata["tokenizer.ggml.tokens"]))
    blocks = {n: (t, Kind.Q8_0) if t.shape[-1] == 32 else t for n, t in tensors.items()}
    return Path(write(tmp_path / "a.gguf", metadata, blocks))


def test_a_copy_in_float32_differs_in_its_blocks_alone(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert float32.block_type(str(file)) == "Q8_0"
    unpacked = float32.as_float32(str(file))
    assert float32.block_type(unpacked) == "F32"
    before, after = read_gguf(str(file)), read_gguf(unpacked)
    assert before.values | {"general.file_type": 0} == after.values
    assert list(before.tensors) == list(after.tensors)
    for name, tensor in before.tensors.items():
        np.testing.assert_array_equal(tensor.unpacked(), after.tensors[name].unpacked())
    made = os.stat(unpacked).st_mtime_ns
    assert float32.as_float32(str(file)) == unpacked
    assert os.stat(unpacked).st_mtime_ns == made


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"),
        (b"llama.rope.freq_base", b"tokenizer.ggml.model"),
    ],
)
def test_a_key_or_tensor_that_occurs_twice(old, new, file):
    data = file.read_bytes()
    assert len(old) == len(new) and data.count(old) == 1 and new in data
    file.unlink()
    file.write_bytes(data.replace(old, new))
    with refused(f"'{new.decode()}' occurs twice"):
        read_gguf(str(file))


@pytest.mark.parametrize("shape", [(63, 2), (64, 0)])
def test_a_shape_that_is_not_made_of_blocks(shape, tmp_path):
    path = tmp_path / "a.gguf"
    tensor = np.ones((2, 64), np.float32), Kind.Q8_0
    data = Path(write(path, {}, {"x": tensor})).read_bytes()
    right = struct.pack("<QQ", 64, 2)
    assert data.count(right) == 1
    path.write_bytes(data.replace(right, struct.pack("<QQ", *shape)))
    with refused("'x' of shape .* is not made of blocks of 32"):
        read_gguf(str(path))
