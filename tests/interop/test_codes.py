"""Heads stored in a byte a weight: small, within half a step of every column, strict."""

import jax
import numpy as np
import pytest
from head_files import WIDER as LLAMA
from safetensors.numpy import load_file, save_file

from medusa_jax.commands import convert as command
from medusa_jax.config import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.interop import codes, heads_io, own_heads
from medusa_jax.interop.stored_heads import abstract_heads
from medusa_jax.sharding import make_mesh

HEADS = HeadsConfig(n_heads=2, n_layers=2, lm_head="shared")


@pytest.fixture
def saved(tmp_path):
    rng = np.random.default_rng(0)
    shapes = abstract_heads(HEADS, LLAMA)
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), shapes)
    base = {"d_model": 32, "vocab_size": 64, "fingerprint": "00"}
    args = (HEADS, params)
    own_heads.save_heads(str(tmp_path), *args, base=base, recipe={}, dtype="int8")
    return tmp_path, params


def load(path):
    return heads_io.load_heads(str(path), LLAMA, make_mesh())[1]


def test_kernels_come_back_within_half_a_step(saved):
    path, params = saved
    stored = load_file(path / "heads.safetensors")
    assert stored["heads_0/layers_1/kernel/codes"].dtype == np.int8
    assert (path / "heads.safetensors").stat().st_size < 1.5 * sum(
        x.size for x in jax.tree.leaves(params)
    )
    for layer, again in zip(params["heads_1"].values(), load(path)["heads_1"].values()):
        step = np.abs(layer["kernel"]).max(axis=0) / 127
        assert (np.abs(again["kernel"] - layer["kernel"]) <= step * 0.5001).all()
        np.testing.assert_allclose(again["bias"], layer["bias"], rtol=2**-8)


def test_a_column_of_nothing_stays_nothing():
    coded = codes.encode({"a/kernel": np.zeros((3, 2), np.float32)})
    assert not coded["a/kernel/codes"].any() and np.isfinite(coded["a/kernel/scales"]).all()


@pytest.mark.parametrize(
    "change",
    [
        {"scales": None},
        {"codes": None},
        {"codes": np.zeros((32, 32), np.float32)},
        {"scales": np.zeros((1, 31), np.float32)},
    ],
)
def test_damaged_pairs(saved, change):
    path, _ = saved
    file = path / "heads.safetensors"
    state = load_file(file)
    for part, array in change.items():
        name = f"heads_1/layers_0/kernel/{part}"
        del state[name]
        state |= {} if array is None else {name: array}
    save_file(state, file)
    with pytest.raises(UserError, match="needs codes in int8"):
        load(path)


def test_the_demo_s_heads_in_a_byte_a_weight(tmp_path, capsys):
    """By command, with the tree next to them; and back to a type that holds all values."""
    small, wide = str(tmp_path / "small"), str(tmp_path / "wide")
    flags = ["--drafter=medusa", "--dtype=int8"]
    assert command.main([*flags, "--to=tgi", f"--out={small}"]) == 2
    assert "int8 is for --to native" in capsys.readouterr().err
    assert command.main([*flags, "--to=native", f"--out={small}"]) == 0
    assert (tmp_path / "small" / "tree.json").exists()
    assert command.main([f"--drafter={small}", "--to=native", f"--out={wide}"]) == 0
    read, again = (load_file(f"{d}/heads.safetensors") for d in (small, wide))
    kernel = "heads_0/layers_0/kernel"
    found = read[f"{kernel}/codes"].astype(np.float32) / 127 * read[f"{kernel}/scales"]
    np.testing.assert_array_equal(again[kernel], found)
