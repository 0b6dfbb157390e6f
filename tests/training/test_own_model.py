"""From a model of one's own to heads that decode: docs/own_model.md as it is written, and one-line refusals."""

import json
import re
import shlex

import jax
import numpy as np
import pytest
from files import write_lines
from tiny import write_ending_model
from training_setup import ROOT

from medusa_jax.__main__ import main
from medusa_jax.commands import own as own_heads
from medusa_jax.commands import train
from medusa_jax.commands.serve import main as serving
from medusa_jax.config import Config, TrainConfig
from medusa_jax.distill.seeds import read_seeds
from medusa_jax.evaluate.own_costs import Costs
from medusa_jax.heads.registry import drafter_class
from medusa_jax.training import own_recipe
from medusa_jax.training.plan import RunPlan

# Smaller than the page's.
MORE = {
    "distill": "--max_new_tokens 24 --batch_size 8 --temperature 1",
    "train": "--config.train.steps 30 --config.train.eval_every 30 --config.data.seq_len 48",
    "calibrate": "--limit 4 --max_new_tokens 16 --sizes 1,2,4 --rounds 2 --batches 1",
    "decode": "--max_new_tokens 24",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_ending_model(directory, max_position=128)
    return directory


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = ["the", "cat", "in", "a", "bar", "is", "there", "and"]
    asked = [{"role": "user", "content": " ".join(rng.choice(words, 3))} for _ in range(40)]
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    return write_lines(file, ({"messages": [turn]} for turn in asked))


def commands(model, questions, place):
    """The page's commands as lists of words."""
    page = (ROOT / "docs" / "own_model.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.S)
    for block in blocks:
        block = block.replace("path/to/model", str(model)).replace("work/own", str(place))
        block = block.replace("questions.jsonl", str(questions))
        yield shlex.split(block.replace("\\\n", ""))


def run(words):
    """Run a command here; returns its exit status."""
    return main([*words[1:], *shlex.split(MORE.get(words[1], ""))])


@pytest.mark.wide
def test_the_page_from_top_to_bottom(model, questions, tmp_path, capsys):
    """Each command names the next one of the page, with its own paths."""
    *steps, serve, convert, rebuild = commands(model, questions, tmp_path / "own")
    for words, following in zip(steps, [*steps[1:], serve]):
        assert run(words) == 0
        said = capsys.readouterr()
        [named] = [x for x in said.err.splitlines() if x.startswith("next: ")]
        assert shlex.split(named)[1:] == following, words
        if words[1] == "train":
            assert "(convert --to): medusa_jax (native), vLLM (vllm), TGI" in said.err
            assert "hidden states, computed once" in said.err and "  objective " in said.err
    assert "identical" in said.err and "not identical" not in said.err
    assert serving.parse(serve[4:]).chat == ""  # the model's own template
    assert run(convert) == 0
    assert own_heads.main.parse(rebuild[2:]).start == "path/to/heads"
    for result in ("best", "export"):
        made = json.loads((tmp_path / "own" / "run" / result / "heads.json").read_text())
        assert made["recipe"]["held_out"]["accepted_length_tree"] >= 1, result


def own(*fields):
    return [f"--config={ROOT}/configs/own.py", *(f"--config.{field}" for field in fields)]


def test_sizes_follow_from_model_and_family(model, questions):
    for family in ("medusa", "hydrapp", "eagle", "dspark", "dflash", "eagle3"):
        given = f"model.path={model}", f"data.source={questions}", f"heads.drafter={family}"
        cfg = train.parse(own(*given))
        assert train.parse(own(*given)[1:]) == cfg  # without --config
        assert type(cfg.heads) is drafter_class(family).Config
        assert cfg.data.seq_len == 128 and cfg.heads.draft_vocab == 0
        assert cfg.workdir.endswith("runs/own")
    assert cfg.train.levels == 4 and cfg.heads.lm_head == "own"
    given = ("data.source=x", "data.seq_len=20", "heads.skip=random", "heads.drafter=hydra")
    cfg = train.parse(own(f"model.path={model}", *given))
    assert (cfg.data.seq_len, cfg.heads.skip, cfg.heads.n_heads) == (20, "random", 4)


def test_a_small_text_gives_hundreds_of_updates_everywhere(tmp_path, monkeypatch):
    """Of 300 conversations or 200 questions; a large text has the recipe's batch. One rule for all devices."""
    write_ending_model(tmp_path / "m", max_position=2048)
    talk = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "a" * 1000},
    ]
    write_lines(tmp_path / "talk.jsonl", [{"messages": talk}] * 300)
    size = (tmp_path / "talk.jsonl").stat().st_size / 4
    costs = Costs(program=0.5, step=0.001, batch_step=1.0, token=0.002, learned=0.0005)
    monkeypatch.setattr("medusa_jax.evaluate.own_costs.measure", lambda *_: costs)
    asked = write_lines(tmp_path / "q.jsonl", ({"turns": [f"{n}"]} for n in range(200)))
    seeds = read_seeds(str(asked), "train", 0)
    flags = own_heads.Flags(
        model=f"{tmp_path}/m", questions=f"{asked}", out=f"{tmp_path}/o"
    )
    for backend, most, seq_len in (("gpu", 64, 2048), ("cpu", 4, 512)):
        monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
        given = f"model.path={tmp_path}/m", f"data.source={tmp_path}/talk.jsonl"
        plan = RunPlan(train.parse([*own(*given), f"--workdir={tmp_path}/run"]))
        assert (
            200 <= plan.steps(int(size) // seq_len) <= 800 and plan.data.seq_len == seq_len
        )
        assert plan.train.accumulation == 1
        cfg = train.parse(own(*given[:1], "data.source=a/dataset"))
        assert (cfg.train.batch_size, cfg.train.epochs) == (most, 2)
        assert cfg.train.accumulation == max(1, most // 8)
        job, _ = own_heads.fitted(flags, seeds, own_heads.recipe(flags, tmp_path))
        assert 100 <= job.steps <= 400 and job.batch <= 4, backend
    for shards, tokens, batch in ((6, 1e9, 48), (8, 100, 8)):
        monkeypatch.setattr(own_recipe, "row_shards", lambda _, n=shards: n)
        cfg = Config(train=TrainConfig(batch_size=64))
        assert own_recipe.batch_for(cfg, tokens) == batch


def test_one_line_says_what_is_wrong(model, tmp_path, capsys):
    assert train.main([*own(f"model.path={model}"), f"--workdir={tmp_path}"]) == 2
    said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(said) == 1 and "set --config.data.source" in said[0]
