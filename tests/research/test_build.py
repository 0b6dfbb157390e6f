"""The demo can be rebuilt: the documented command, on a tiny budget."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_tiny_build_installs_a_working_demo(tmp_path: Path) -> None:
    work, target = tmp_path / "work", tmp_path / "demo"
    command = [
        "-m",
        "research",
        "demo_build",
        "--tiny",
        f"--work={work}",
        f"--install={target}",
    ]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    built = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-3000:]

    tree = json.loads((target / "hydra" / "tree.json").read_text())
    assert len(tree["choices"]) == tree["nodes"] - 1
    assert tree["evidence"]["ladder"][0]["nodes"] == 1
    prompts = (target / "prompts.jsonl").read_text().splitlines()
    assert prompts and {"prompt", "continuation_ids"} <= set(json.loads(prompts[0]))
    made = json.loads((target / "provenance.json").read_text())
    assert made["heads"] and made["answers"]["no_repeat_ngram_size"] == 5

    decoded = subprocess.run(
        [
            sys.executable,
            "decode.py",
            f"--model={target}/backbone",
            f"--drafter={target}/hydra",
            "--tree=chain:2",
            "--prompt=def f(",
            "--max_new_tokens=12",
            "--compare",
            "--json",
        ],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert decoded.returncode == 0, decoded.stderr[-3000:]
    facts = json.loads(decoded.stdout)
    assert facts["identical"] and facts["new_tokens"] == 12

    again = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert again.returncode == 0 and again.stderr.count("skipped") == 6
