"""Other engines: what is missing is named; files in float32 for a fair comparison."""

import os
import sys

import numpy as np
import pytest
from gguf_files import gguf, write

from medusa_jax import UserError
from medusa_jax.files.gguf.reader import read_gguf
from research import against
from research.peers import (
    Setting,
    float32,
    ik_llamacpp,
    llamacpp,
    openvino,
    vllm_cpu,
    xllamacpp,
)

Kind = gguf.GGMLQuantizationType


@pytest.mark.parametrize("peer", sorted({*against.PEERS} - {"ik_llama.cpp"}))
def test_what_is_missing_is_named(peer, monkeypatch, capsys):
    for name in ("llama_cpp", "torch", "openvino", "xllamacpp", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    assert against.contenders_of(peer, Setting("a.gguf", 3, 40, 3, 0, 1.0)) == []
    said = f"left out: {peer} needs a package: pip install {against.PEERS[peer][1]}\n"
    assert capsys.readouterr().err == said


def test_llama_cpp_reads_gguf_files():
    with pytest.raises(UserError, match=r"is not a GGUF file, which llama\.cpp needs"):
        llamacpp.contenders(Setting("some/directory", 3, 40, 3, 0, 1.0))


@pytest.mark.parametrize("peer", [llamacpp, ik_llamacpp, openvino, xllamacpp, vllm_cpu])
@pytest.mark.parametrize("adjusted", [(5, 1.0), (0, 1.1)])
def test_peers_of_logits_alone(peer, adjusted):
    with pytest.raises(UserError, match="--no_repeat_ngram_size 0 --repetition_penalty 1"):
        peer.contenders(Setting("a.gguf", 3, 40, 3, *adjusted))


@pytest.fixture
def tensors():
    """Two matrices in blocks of 8 bits, and a norm in float32."""
    rng = np.random.default_rng(0)
    blocks = {
        name: (rng.standard_normal((4, 64)).astype(np.float32), Kind.Q8_0) for name in "ab"
    }
    return blocks | {"norm": np.ones(64, np.float32)}


def test_a_copy_in_float32_differs_in_its_blocks_alone(tensors, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = write(tmp_path / "a.gguf", {"general.file_type": 7}, tensors)
    assert float32.block_type(file) == "Q8_0"
    unpacked = float32.as_float32(file)
    assert float32.block_type(unpacked) == "F32"
    before, after = read_gguf(file), read_gguf(unpacked)
    assert before.values | {"general.file_type": 0} == after.values
    assert list(before.tensors) == list(after.tensors)
    for name, tensor in before.tensors.items():
        np.testing.assert_array_equal(tensor.unpacked(), after.tensors[name].unpacked())
    made = os.stat(unpacked).st_mtime_ns
    assert float32.as_float32(file) == unpacked
    assert os.stat(unpacked).st_mtime_ns == made


def test_the_copy_of_a_split_file_is_one_file(tensors, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write(tmp_path / "m.gguf", {}, tensors, split=2)
    first, second = sorted(tmp_path.glob("m-*.gguf"))
    assert float32.gguf_file(str(second)) == str(first)
    with open(float32.as_float32(str(second)), "rb") as file:
        assert b"split.count" not in file.read()
