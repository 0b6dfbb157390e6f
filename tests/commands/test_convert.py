"""The command: from flags to a directory, an upload, or one sentence."""

import json

import pytest

from medusa_jax.__main__ import main
from medusa_jax.api import find_heads
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


@pytest.mark.parametrize("works", [True, False])
def test_upload(works, tmp_path, monkeypatch, capfd):
    import huggingface_hub

    calls = []

    class Api:
        def create_repo(self, repo, private, exist_ok):
            calls.append((repo, private, exist_ok))

        def upload_folder(self, folder_path, repo_id):
            if not works:
                raise OSError("401\nmore")
            calls.append((folder_path, repo_id))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    out = str(tmp_path / "out")
    flags = ("--drafter", "medusa", "--to", "vllm", "--out", out, "--push", "me/heads")
    assert convert(*flags) == (0 if works else 2)
    said = capfd.readouterr().err
    assert calls[0] == ("me/heads", True, True)
    if works:
        assert calls[1] == (out, "me/heads") and "huggingface.co/me/heads" in said
    else:
        assert (
            "could not be uploaded to me/heads (OSError: 401): run `hf auth login`" in said
        )
