"""Every command of `research/` runs on a tiny model and leaves its files; each one's figures are tested next to it."""

import json

import numpy as np
import pytest
from files import PROMPTS, write_lines
from safetensors.numpy import load_file
from tiny import write_heads, write_model
from training_setup import ROOT, write_config

from medusa_jax.config import LlamaConfig
from medusa_jax.evaluate.race import Contender, Run
from medusa_jax.files.hf_writer import config_to_hf
from medusa_jax.files.shapes import SHAPES
from medusa_jax.heads.dflash import DSparkConfig
from medusa_jax.training.data.rows import write_tokens
from research import (
    against,
    batches,
    confidence,
    roofline,
    step_cost,
    sweep,
    train_cost,
    tree_shapes,
)
from research.family import command as family
from research.peers import huggingface, llamacpp
from research.recipes import command as recipes
from research.recipes import text

SMALL = LlamaConfig(64, 64, 2, 4, 2, 16, 128, 128)
MODEL = "--model={t}/model"
ASKED = f"{MODEL} --prompts={{t}}/prompts.jsonl --out={{t}}/out"
# By command: its flags, its files, and words that it prints.
COMMANDS = {
    against: (
        f"{ASKED} --drafters={{t}}/model/heads --peers=transformers,llama.cpp --trees=chain:2 "
        "--max_new_tokens=6 --repeats=1 --limit=2 --threads=3",
        ["against.json", "against.md"], "| transformers | F32 | 10.0 |",
    ),
    sweep: (
        f"{ASKED} --drafter={{t}}/model/heads --tree=chain:2 --max_new_tokens=16 "
        "--epsilons=0.01,0.8 --temperatures=0,1.0",
        ["sweep.json", "thresholds.png", "temperatures.png"], "| typical, T 0.7 |",
    ),
    batches: (
        f"{ASKED} --drafters={{t}}/model/heads --sizes=1,3 --most_nodes=2 --limit=4 "
        "--max_new_tokens=12 --repeats=1 --dtype=float32",
        ["batches-medusa.json"], " of ",
    ),
    tree_shapes: (
        f"{ASKED} --drafter={{t}}/model/heads --max_new_tokens=40 --sizes=2,4 --rounds=1 "
        "--one_depth=3 --dense=2",
        ["tree_shapes.json", "dense.png"], "one depth",
    ),
    roofline: (
        "--measure_batches=1 --measure_lengths=8,32 --measure_trees=4 --rounds=1 "
        "--most_gflop=2e-4 --batches=1 --lengths=32 --out={t}/out",
        ["measured.json", "measured.png", "acceleration.png"],
        "timings, 2 points larger than the limits",
    ),
    confidence: (
        f"{ASKED} --drafter={{t}}/sure --sizes=1,2,3 --rounds=1 --max_new_tokens=24",
        ["confidence.json"], "| bound |",
    ),
    step_cost: (
        "--shape={t} --drafters=medusa --repeats=1 --sizes=8,16 --context=20 --batch=2 "
        "--out={t}/out",
        ["step_cost.json"], "| drafter | heads, GB | 8 nodes | 16 nodes |",
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
    config, params = write_model(tmp_path / "model")
    for name in ("sure", "unsure"):
        fields = {"n_layers": 1, "markov_rank": 4, "tap_layers": "1"}
        heads = DSparkConfig(n_heads=2, confidence=name == "sure", **fields)
        write_heads(tmp_path / name, config, params, heads)
    ladder = [{"nodes": 1, "tokens_per_step": 1.0}, {"nodes": 2, "tokens_per_step": 99.0}]
    tree = {"choices": [], "growth": [[0]], "evidence": {"ladder": ladder}}
    (tmp_path / "model" / "heads" / "tree.json").write_text(json.dumps(tree))
    write_lines(tmp_path / "prompts.jsonl", ({"prompt": p} for p in PROMPTS))
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(SMALL)))
    rng = np.random.default_rng(0)
    pieces = [rng.integers(3, config.vocab_size, 30, dtype=np.int32) for _ in range(40)]
    write_tokens(tmp_path / "data", pieces)
    texts = ["".join(rng.choice(list("abcdefghij ,."), 900)) for _ in range(3)]
    monkeypatch.setattr(text, "new_text", lambda: texts)
    for peer, name in ((llamacpp, "llama.cpp"), (huggingface, "transformers")):
        run = Run([[1] * 6], 0.1, 0.5)
        made = [Contender(name, lambda prompt, run=run: run, "F32")]
        monkeypatch.setattr(peer, "contenders", lambda setting, made=made: made)
    monkeypatch.setitem(SHAPES, "llama-7b", SMALL)
    monkeypatch.setattr(roofline, "STRETCH", 1e-4)
    monkeypatch.setattr(roofline, "MOST_COPIES", 2)
    monkeypatch.setattr(step_cost, "read_bandwidth", lambda n_bytes: 1e9)
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
    if command is confidence:
        assert command.main(flags.format(t=places).replace("/sure", "/unsure").split()) == 2
        assert "have no confidence" in capsys.readouterr().err


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["", "float32"])
def test_a_training_step_is_timed_with_both_losses(places, capsys, kind):
    config = write_config(places, str(places / "data"), "medusa1")
    flags = [f"--config={config}", "--steps=2", f"--config.data.cache_features={kind}"]
    assert train_cost.main([*flags, "--config.data.packing=first_fit"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [r[1].strip() for r in rows[2:]] == ["chunked", "naive"]
    assert all(float(r[2]) > 0 for r in rows[2:])
