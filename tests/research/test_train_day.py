"""The minutes of a lent accelerator become heads, and the same command goes on."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from children import environment
from files import read_lines
from training_setup import ROOT

from medusa_jax import load

SMALL = {"train.batch_size": 2, "data.seq_len": 64, "data.eval_samples": 4}
SMALL |= {"data.cache_features": ""}


@pytest.mark.slow
def test_minutes_become_heads_that_load(tmp_path):
    flags = " ".join(f"--config.{name}={value}" for name, value in SMALL.items())
    room = {"OUT": str(tmp_path / "out"), "WORK": str(tmp_path / "work"), "LIMIT": "150"}
    room["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    room |= {"MODEL": "medusa_jax/demo/backbone", "FLAGS": flags}
    command = ["bash", "research/train_day.sh", "configs/demo_medusa.py"]

    def day():
        return subprocess.run(
            command, env=environment() | room, cwd=ROOT, timeout=300, check=True
        )

    day()
    first = read_lines(tmp_path / "out" / "demo_medusa.jsonl")
    assert any(line["kind"] == "eval" for line in first)
    day()
    assert read_lines(tmp_path / "out" / "demo_medusa.jsonl")[: len(first)] == first
    with tarfile.open(tmp_path / "out" / "demo_medusa.tgz") as packed:
        packed.extractall(tmp_path, filter="data")
    model = load(drafter=str(tmp_path / "demo_medusa"))
    assert model.has_drafter and model.drafter.heads.n_heads == 4
