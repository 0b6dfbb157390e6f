"""The longer commands of `research/` run on a tiny model and leave their files."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
from files import PROMPTS, write_lines
from safetensors.numpy import load_file
from tiny import write_model
from training_setup import ROOT

from medusa_jax.evaluate.race import Contender, Run
from medusa_jax.training.data.rows import write_tokens
from research import against
from research.family import command as family
from research.peers import huggingface, llamacpp, xllamacpp
from research.recipes import command as recipes
from research.recipes import text

MODEL = "--model={t}/model"
ASKED = f"{MODEL} --prompts={{t}}/prompts.jsonl --out={{t}}/out"
# By command: its flags, its files, and words that it prints.
COMMANDS = {
    against: (
        f"{ASKED} --drafters={{t}}/model/heads --peers=transformers,llama.cpp,xllamacpp --trees=chain:2 "
        "--max_new_tokens=6 --repeats=1 --limit=2 --threads=3",
        ["against.json", "against.md"], "| 1.00 | 0.0% | 2 of 2 |",
    ),
    family: (
        f"{ASKED} --data={{t}}/data --eval_data={{t}}/data --calibration={{t}}/prompts.jsonl "
        "--drafters=medusa,eagle3 --only=eagle3:heads.tap_layers=0,1 "
        "--only=eagle3:train.levels=2 --seeds=1 --steps=2 --n_heads=3 --rank=4 --nodes=4 "
        "--limit=2 --max_new_tokens=24 --repeats=1 --config.data.seq_len=32 "
        "--config.train.loss_chunk=16 --config.data.eval_samples=4",
        ["family.json", "family.md", "family.png"], "medusa",
    ),
    recipes: (
        f"{MODEL} --original={{t}}/data --out={{t}}/out --variants=baseline,medusa1,medusa2 "
        "--steps=4 --seeds=1 --length=32 --rank=8 --distill=4 --prompts=2 --new_tokens=8 "
        "--rows=8",
        ["table.md", "curves.png"], "| medusa2 |",
    ),
}  # fmt: skip
LONG = {family: pytest.mark.slow, recipes: pytest.mark.slow, against: ()}


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A model with heads and a tree, prompts, tokens, peers and texts that stand for the real ones."""
    monkeypatch.chdir(ROOT)
    config, _ = write_model(tmp_path / "model")
    write_lines(tmp_path / "prompts.jsonl", ({"prompt": p} for p in PROMPTS))
    rng = np.random.default_rng(0)
    pieces = [rng.integers(3, config.vocab_size, 30, dtype=np.int32) for _ in range(40)]
    write_tokens(tmp_path / "data", pieces)
    texts = ["".join(rng.choice(list("abcdefghij ,."), 900)) for _ in range(3)]
    monkeypatch.setattr(text, "new_text", lambda: texts)
    for peer, name in ((llamacpp, "llama.cpp"), (huggingface, "transformers")):
        run = Run([[1] * 6], 0.1, 0.5)
        made = [Contender(name, lambda prompt, run=run: run, "F32")]
        monkeypatch.setattr(peer, "contenders", lambda setting, made=made: made)
    # One whose package is missing does not end the comparison.
    missing = Mock(side_effect=ImportError("no such package"))
    monkeypatch.setattr(xllamacpp, "contenders", missing)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=LONG.get(c, pytest.mark.wide), id=c.__name__) for c in COMMANDS],
)
def test_it_runs(command, places, capsys):
    flags, files, words = COMMANDS[command]
    assert command.main(flags.format(t=places).split()) == 0
    assert words in " ".join(capsys.readouterr().out.split())
    assert all((places / "out" / name).stat().st_size > 100 for name in files)
    if command is family:
        found = json.loads((places / "out" / "family.json").read_text())["runs"]
        for name, [run] in found.items():
            stored = load_file(places / f"out/{name}-s0/export/heads.safetensors")
            assert run["parameters"] == sum(x.size for x in stored.values())
            assert run["decoded"][0]["divergences"] == 0
    if command in (family, recipes):  # nothing is trained twice
        assert command.main(flags.format(t=places).split()) == 0
