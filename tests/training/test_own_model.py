"""From a model of one's own to heads that decode: docs/own_model.md as it is written, and one-line refusals."""

import json
import re
import shlex

import numpy as np
import pytest
from files import write_lines
from tiny import write_ending_model
from training_setup import ROOT

from medusa_jax.__main__ import main
from medusa_jax.commands import own as own_heads
from medusa_jax.commands import train
from medusa_jax.commands.serve import main as serving
from medusa_jax.heads.registry import drafter_class

# Smaller than the page's.
MORE = {
    "distill": "--max_new_tokens 24 --batch_size 8 --temperature 1",
    "train.py": "--config.train.steps 30 --config.train.eval_every 30 --config.data.seq_len 48",
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
    own = words[1].endswith("train.py")
    name, given = words[1], words[2:]
    given = [str(ROOT / word) if word.startswith("configs/") else word for word in given]
    given += shlex.split(MORE.get(name, ""))
    return train.main(given) if own else main([name, *given])


@pytest.mark.wide
def test_the_page_from_top_to_bottom(model, questions, tmp_path, capsys):
    """Each command names the next one of the page, with its own paths."""
    *steps, serve, convert, rebuild = commands(model, questions, tmp_path / "own")
    for words, following in zip(steps, [*steps[1:], serve]):
        assert run(words) == 0
        said = capsys.readouterr()
        [named] = [x for x in said.err.splitlines() if x.startswith("next: ")]
        assert shlex.split(named)[1:] == following, words
        if words[1].endswith("train.py"):
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
        assert type(cfg.heads) is drafter_class(family).Config
        assert cfg.data.seq_len == 128 and cfg.heads.draft_vocab == 0
        assert cfg.workdir.endswith("runs/own")
    assert cfg.train.levels == 4 and cfg.heads.lm_head == "own"
    given = ("data.source=x", "data.seq_len=20", "heads.skip=random", "heads.drafter=hydra")
    cfg = train.parse(own(f"model.path={model}", *given))
    assert (cfg.data.seq_len, cfg.heads.skip, cfg.heads.n_heads) == (20, "random", 4)


def test_one_line_says_what_is_wrong(model, tmp_path, capsys):
    assert train.main([*own(f"model.path={model}"), f"--workdir={tmp_path}"]) == 2
    said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(said) == 1 and "set --config.data.source" in said[0]
