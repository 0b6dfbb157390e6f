"""The like-for-like comparison: its tables, its claims about order, a tiny run of the whole."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import write_model

from medusa_jax.cpu.library import library
from medusa_jax.errors import UserError
from research.family.command import main, refuse_other

PROJECT = Path(__file__).parents[2]


def test_a_training_with_other_settings_is_not_taken_for_this_one(tmp_path):
    asked = {room: {} for room in ("heads", "data", "optim", "lora")}
    asked["train"] = {"steps": 1200, "eval_every": 150, "dtype": "bfloat16"}
    found = asked | {"train": {"steps": 1200, "eval_every": 75, "dtype": "bfloat16"}}
    (tmp_path / "config.json").write_text(json.dumps(found))
    refuse_other(tmp_path, asked)  # how often it was watched does not matter
    asked["train"]["steps"] = 400
    with pytest.raises(
        UserError, match=r"was trained with train.steps 1200 \(asked: 400\)"
    ):
        refuse_other(tmp_path, asked)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"no readable config.json"):
        refuse_other(tmp_path, asked)


@pytest.mark.slow
def test_a_tiny_family(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(PROJECT)
    if library() is not None:  # drafters are packed, and still counted as they are trained
        monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "native")
    config, _ = write_model(tmp_path / "model")
    data = tmp_path / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    np.save(data / "tokens.npy", rng.integers(3, config.vocab_size, 600).astype(np.uint16))
    np.save(data / "doc_starts.npy", np.arange(0, 600, 30))
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}) + "\n" for text in ("the cat", "abc", "in the")]
    prompts.write_text("".join(lines))
    arguments = [
        f"--model={tmp_path}/model", f"--data={data}", f"--eval_data={data}",
        f"--calibration={prompts}", f"--prompts={prompts}", "--drafters=medusa,hydrapp,amphista,eagle3",
        "--only=eagle3:heads.tap_layers=0,1", "--only=eagle3:train.levels=2",
        "--seeds=2", "--steps=2", "--n_heads=3", "--rank=4", "--nodes=4", "--limit=2",
        "--max_new_tokens=24", "--repeats=1", f"--out={tmp_path}/out",
        "--config.data.seq_len=32", "--config.train.loss_chunk=16",
        "--config.data.eval_samples=4",
    ]  # fmt: skip
    assert main(arguments) == 0
    first = json.loads((tmp_path / "out" / "family.json").read_text())
    assert sorted(first["runs"]) == ["amphista", "eagle3", "hydrapp", "medusa"]
    for name, runs in first["runs"].items():
        assert len(runs) == len(first["curves"][name]) == 2
        assert first["curves"][name][0][-1]["step"] == 2
        for seed, run in enumerate(runs):
            stored = load_file(tmp_path / f"out/{name}-s{seed}/export/heads.safetensors")
            assert run["parameters"] == sum(x.size for x in stored.values())
            [row] = run["decoded"]
            assert run["drafter"] == name and row["nodes"] == 4
            assert row["mean_accepted_length"] >= 1 and row["divergences"] == 0
            assert 0 < row["draft_share"] < 5
            assert len(run["top1"]) == 3 and run["top1"] <= run["top5"]
    assert "| held-out top-1 at step | 1 | 2 |" in (tmp_path / "out/family.md").read_text()
    assert (tmp_path / "out" / "family.png").stat().st_size > 1000
    capsys.readouterr()
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.err.count("not trained again") == said.err.count("not measured again") == 8
    again = json.loads((tmp_path / "out" / "family.json").read_text())
    for kept in ("runs", "curves"):  # only the race is run again
        assert again[kept] == first[kept]
    assert main([*arguments, "--config.optim.lr=0.5"]) == 2
    assert "optim.lr 0.003 (asked: 0.5)" in capsys.readouterr().err
