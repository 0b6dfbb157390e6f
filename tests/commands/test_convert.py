"""The command: from flags to a directory."""

import json

from medusa_jax.__main__ import main
from medusa_jax.api import find_heads
from medusa_jax.formats import export_heads
from medusa_jax.interop.heads_io import open_heads


def convert(*flags):
    return main(["convert", *map(str, flags)])


def test_the_demos_heads_go_out_and_come_back(tmp_path, capfd):
    ours = find_heads(None, "medusa").heads
    out = tmp_path / "tgi"
    assert convert("--drafter", "medusa", "--to", "tgi", "--out", out,
                   "--dtype", "float16", "--base_name", "owner/name") == 0  # fmt: skip
    assert "medusa_jax, 4 heads" in capfd.readouterr().err
    config = json.loads((out / "config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/name"
    assert config["torch_dtype"] == "float16" and (out / "tokenizer.json").exists()
    there = open_heads(str(out / "medusa_lm_head.safetensors")).heads
    assert (there.n_heads, there.n_layers) == (ours.n_heads, ours.n_layers)


def test_a_directory_is_complete_or_absent(tmp_path, monkeypatch, capfd):
    def full(*_):
        raise OSError(28, "No space left on device")

    out = tmp_path / "made" / "tgi"
    monkeypatch.setattr(export_heads, "write_text", full)
    assert convert("--drafter", "medusa", "--to", "tgi", "--out", out) == 2
    assert f"{out} could not be written" in capfd.readouterr().err
    assert not any(out.parent.iterdir())
