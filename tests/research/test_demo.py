"""The demo can be rebuilt: which files become text, what is held out, and the documented command on a tiny budget."""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from children import run
from files import read_lines
from training_setup import ROOT

from research.demo import corpus, sources
from research.demo.sources import SourceFile, distinct_lines

OWNED, READS = "# Copyright (c) 2001 A. Body\n", '"""Reads."""\n\n'
SLOWLY = '"""Reads.\n\nSlowly.\n"""\nx = 1\n'


@pytest.mark.parametrize(
    "before, after",
    [
        (f"{OWNED}#\n# Reads mail.\nimport os\n", "# Reads mail.\nimport os\n"),
        (f'"""Reads.\n\n{OWNED}Licensed to nobody.\n\nSlowly.\n"""\nx = 1\n', SLOWLY),
        (f"{READS}# Licensed under terms.\nimport os\n", f"{READS}import os\n"),
        ("import os\n\n\n# the license of a driver\n", None),
        ("import os\n# Copyright 2001 A. Body\nx = 1\n", "import os\nx = 1\n"),
        ('def f():\n    """Show the license."""\n', None),
        ("#!/usr/bin/env python\n# Reads.\n#\n# More.\nx = 1\n", None),
        ("'''Unfinished copyright\n", None),
    ],
)
def test_drop_licence(before, after):
    assert sources.drop_licence(before) == (before if after is None else after)


def test_near_duplicates_of_heldout_files_leave_training():
    def words(name, n):
        return "".join(f"{name} says this on line {i}\n" for i in range(n))

    files = [SourceFile(f"{i}.py", words(i, 40)) for i in range(60)]
    train, held, dropped = sources.split_files(files, 0.1)
    assert held and not dropped and len(train) + len(held) == 60
    copy = SourceFile("copy.py", held[0].text + words("another", 20))
    part = SourceFile("part.py", held[0].text[:200] + words("more", 40))
    assert sources.path_fraction("copy.py") > 0.1 < sources.path_fraction("part.py")
    train, held, dropped = sources.split_files([*files, copy, part], 0.1)
    assert dropped == ["copy.py"]
    assert part in train and copy not in train + held


TINY = {"vocab": 512, "limit_mb": 0.5, "heldout": 0.1, "prompts": 20, "seeds": 50}


@pytest.mark.wide
def test_heldout_is_not_in_train(tmp_path):
    from transformers import AutoTokenizer

    flags = [f"--{name}={value}" for name, value in TINY.items()]
    assert corpus.main(["--out", str(tmp_path), *flags]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")

    def texts(part):
        tokens = np.load(tmp_path / part / "tokens.npy")
        starts = np.load(tmp_path / part / "doc_starts.npy")
        assert tokens.dtype == np.uint16 and tokens.ndim == 1
        return [tokenizer.decode(ids[1:-1]) for ids in np.split(tokens, starts[1:])]

    train, held = texts("train"), texts("heldout")
    assert train and held and not set(train) & set(held)
    for text in held:
        own = distinct_lines(text)
        for other in train:
            common = own & distinct_lines(other)
            assert len(common) < 5 or len(common) < 0.6 * len(own)
    together = "\n".join(train)
    for row in read_lines(tmp_path / "heldout" / "prompts.jsonl"):
        assert row["prompt"] + row["continuation"] not in together


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
