"""The demo can be rebuilt: the documented command, on a tiny budget."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from children import run
from training_setup import ROOT


@pytest.mark.slow
def test_tiny_build_installs_a_working_demo(tmp_path: Path) -> None:
    work, target = tmp_path / "work", tmp_path / "demo"
    build = f"-m research demo_build --tiny --work={work} --install={target}".split()
    start = partial(run, sys.executable, HF_HUB_OFFLINE="1")
    built = start(*build)
    assert built.returncode == 0, built.stderr[-3000:]
    tree = json.loads((target / "hydra" / "tree.json").read_text())
    assert len(tree["choices"]) == tree["nodes"] - 1
    assert tree["evidence"]["ladder"][0]["nodes"] == 1
    prompts = (target / "prompts.jsonl").read_text().splitlines()
    assert prompts and {"prompt", "continuation_ids"} <= set(json.loads(prompts[0]))
    made = json.loads((target / "provenance.json").read_text())
    assert made["heads"] and made["answers"]["no_repeat_ngram_size"] == 5
    flags = f"--model={target}/backbone --drafter={target}/hydra --tree=chain:2 --compare --json"
    decoded = start(
        ROOT / "decode.py", *flags.split(), "--prompt=def f(", "--max_new_tokens=12"
    )
    assert decoded.returncode == 0, decoded.stderr[-3000:]
    facts = json.loads(decoded.stdout)
    assert facts["identical"] and facts["new_tokens"] == 12
    again = start(*build)
    assert again.returncode == 0 and again.stderr.count("skipped") == 6
