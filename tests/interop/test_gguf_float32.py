"""A GGUF file with its weights unpacked, and llama.cpp on both."""

import os

import numpy as np
import pytest
from gguf_files import byte_level_metadata, gguf, llama_tensors, shape_metadata, write

import medusa_jax
from medusa_jax import Options, Tree, UserError
from medusa_jax.evaluate.race import ourselves, race
from medusa_jax.formats.gguf import float32
from medusa_jax.formats.gguf.reader import read_gguf
from research.peers import Setting
from research.peers.llamacpp import contenders

Q8 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture
def path(byte_level_dir, monkeypatch, tmp_path):
    """A tied llama model in blocks of 8 bits, its norms in float32."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer_json = (byte_level_dir / "tokenizer.json").read_text()
    metadata = byte_level_metadata(
        tokenizer_json, **{"ggml.bos_token_id": 0, "ggml.eos_token_id": 1}
    )
    metadata |= shape_metadata("llama", feed_forward_length=64) | {"general.file_type": 7}
    tensors = llama_tensors(len(metadata["tokenizer.ggml.tokens"]))
    rng = np.random.default_rng(1)
    for name, tensor in tensors.items():
        if "ffn" in name and "norm" not in name:  # whole blocks in every row
            shape = tuple(64 if size == 48 else size for size in tensor.shape)
            tensors[name] = rng.normal(size=shape).astype(np.float32)
    scaled = {n: (0.2 * t if t.ndim == 2 else t) for n, t in tensors.items()}
    blocks = {n: (t, Q8) if t.ndim == 2 else t for n, t in scaled.items()}
    return write(tmp_path / "a.gguf", metadata, blocks)


def test_only_the_blocks_change(path):
    assert float32.block_type(path) == "Q8_0"
    unpacked = float32.as_float32(path)
    assert float32.block_type(unpacked) == "F32"
    before, after = read_gguf(path), read_gguf(unpacked)
    assert before.metadata | {"general.file_type": 0} == after.metadata
    assert list(before.tensors) == list(after.tensors)
    for name, tensor in before.tensors.items():
        np.testing.assert_array_equal(tensor.unpacked(), after.tensors[name].unpacked())
    made = os.stat(unpacked).st_mtime_ns
    assert float32.as_float32(path) == unpacked and os.stat(unpacked).st_mtime_ns == made


def test_what_fails_leaves_nothing(path, monkeypatch, tmp_path):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(UserError, match="could not be written: No space left"):
        float32.as_float32(path)
    folder = tmp_path / "cache" / "medusa_jax" / "gguf"
    assert not [name for name in os.listdir(folder) if not name.endswith(".lock")]


def test_llama_cpp_says_the_same_in_float32(path):
    """Token for token; a text is not cut at an end of text, which is a token like others here."""
    pytest.importorskip("llama_cpp")
    model = medusa_jax.load(path, dtype="float32")
    ours = ourselves(model, Tree.none(), Options(max_new_tokens=24, eos_ids=()))
    entered = [ours, *contenders(Setting(path, 24, 40, 1, 0))]
    rows = race(entered, [[5, 90, 17], [300, 301]], 1)
    assert [row["weights"] for row in rows] == ["float32", "F32", "Q8_0"]
    assert rows[1]["agreement"] == 1
    assert all(row["tokens_per_second"] > 0 for row in rows)
