"""Our .pt files through torch.load."""

import json

import pytest
from head_files import LLAMA, medusa_state, write
from our_heads import BASE, load

from medusa_jax.formats.export import Export
from medusa_jax.formats.export_heads import convert
from medusa_jax.interop import own_heads
from medusa_jax.interop.base_files import BaseFiles
from medusa_jax.interop.heads_io import open_heads
from medusa_jax.interop.hf_writer import save_backbone

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_our_files_are_torchs(dtype, tmp_path):
    """The legacy export through torch.load, also mapped into memory."""
    save_backbone(str(tmp_path / "base"), LLAMA, BASE, "float32")
    base = BaseFiles.open(str(tmp_path / "base"))
    heads, head_params, _ = load(
        write(tmp_path / "a", medusa_state(2), "medusa_lm_head.pt")
    )
    record = own_heads.base_record(LLAMA, base.fingerprint())
    own_heads.save_heads(str(tmp_path / "b"), heads, head_params, base=record, recipe={})
    stored = open_heads(str(tmp_path / "b"))
    convert(Export(stored, base, "base", dtype), "tensorrt_llm", str(tmp_path / "out"))
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype
    )
    for options in ({}, {"mmap": True}):
        path = tmp_path / "out" / "medusa_lm_head.pt"
        state = torch.load(path, weights_only=True, **options)
        assert state.keys() == medusa_state(2).keys()
        for key, want in medusa_state(2).items():
            want = torch.tensor(want).to(getattr(torch, dtype))
            assert state[key].dtype == want.dtype and torch.equal(state[key], want)
