"""`own`: the four commands in one, stopped and resumed, and its estimate."""

import dataclasses
import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import jax
import pytest
from children import output_of
from files import write_lines
from refusals import refused
from tiny import (
    MARKED,
    random_params,
    set_template,
    write_chat_model,
    write_ending_model,
    write_heads,
)

from medusa_jax import load, programs, sft_draft
from medusa_jax.commands import bench, calibrate, distill, own, serve, train, verify
from medusa_jax.distill.seeds import read_seeds
from medusa_jax.evaluate.own_costs import Costs, Workload, measure
from medusa_jax.evaluate.step_clock import StepClock
from medusa_jax.files.fingerprint import fingerprint
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.heads.names import split_drafter
from medusa_jax.training.evaluation import Evaluator

PARTS = ("answers", "training", "tree", "comparison")
FITTED = (
    Workload(40, 1, 4, 8, decoded=36, read=900, tokens=800, learned=720, compared=48),
    Costs(program=1.0, step=0.01, batch_step=0.02, token=0.001, learned=0.001),
)
WORDS = ("the", "cat", "in", "a", "bar", "is", "there", "and")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A chat model and forty questions."""
    place = tmp_path_factory.mktemp("own")
    write_ending_model(place / "m", max_position=128)
    asked = ({"turns": [f"{a} {b}"]} for a in WORDS for b in WORDS[:5])
    return [str(place / "m"), str(write_lines(place / "questions.jsonl", asked))]


def test_each_part_is_done_once(given, tmp_path, monkeypatch, capsys):
    """A part that was stopped runs again, a finished one does not; a missing certificate is written."""
    monkeypatch.setattr(own, "fitted", lambda *_: FITTED)
    out, done, stop = tmp_path / "out", [], [calibrate]

    def begin(command, flags):
        done.append(command)
        assert flags.chat_template == "vicuna"
        if command in stop:
            stop.remove(command)
            os.kill(os.getpid(), signal.SIGTERM)
        return Path(flags.out)

    def answers(flags):
        place = begin(distill, flags)
        message = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        lines = [{"seed": i, "messages": message, "answers": [{}]} for i in range(40)]
        write_lines(place / "messages.jsonl", lines)
        assert (flags.limit, flags.max_turns) == (40, 1)
        (place / "provenance.json").write_text("{}")
        return 0

    def tree(flags):
        begin(calibrate, flags).write_text("{}")
        assert len(Path(flags.prompts).read_text().splitlines()) == own.HELD_OUT
        return 0

    def comparison(flags):
        (begin(bench, flags) / "race.json").write_text("{}")
        return 0

    def training(cfg):
        done.append(train)
        assert cfg.train.steps == 8 and cfg.data.held_out == 0 and cfg.data.eval_source
        assert cfg.data.chat_template == "vicuna"
        heads = Path(cfg.workdir) / "export"
        heads.mkdir(parents=True)
        (heads / "heads.json").write_text("{}")
        (heads / "certificate").mkdir()
        return 0

    for directory in (out / "text", out / "compare", out / "vllm"):
        directory.mkdir(parents=True)
    monkeypatch.setattr(own, "certify", lambda *given: done.append(given[1:]))
    monkeypatch.setattr(distill, "run", answers)
    monkeypatch.setattr(calibrate, "run", tree)
    monkeypatch.setattr(bench, "run", comparison)
    monkeypatch.setattr(train, "train", training)
    words = [*given, f"--out={out}", "--max_new_tokens=12", "--chat_template=vicuna"]
    assert own.main(words) == 128 + signal.SIGTERM
    said = capsys.readouterr().err
    assert 0 <= said.find("40 questions, 8 steps of training") < said.find("answers: about")
    assert f"to go on: medusa own {' '.join(words)}" in said
    assert done == [distill, train, calibrate]
    assert own.main([*words, "--to=vllm"]) == 0
    said = capsys.readouterr().err
    certified = [(f"{out}/{name}",) * 2 for name in ("run/export", "vllm")]
    assert done[3:] == [calibrate, bench, *certified]
    assert "answers: done before" in said and "training: done before" in said
    assert (
        f"next: medusa serve --model {given[0]} --drafter {out}/run/export --chat vicuna"
        in said
    )
    plan = json.loads((out / "own.json").read_text())
    assert plan["seconds"].keys() == plan["spent"].keys() == set(PARTS)
    assert own.main([*words, "--minutes=5"]) == 2
    assert "minutes None, now it is 5.0" in capsys.readouterr().err


IN_A_WHEEL = """
import pathlib, sys
from medusa_jax.commands import own
model, questions, here = sys.argv[1:]
cfg = own.recipe(own.Flags(model=model, questions=questions, out=""), pathlib.Path(here))
print(own.__file__, cfg.train.stage, cfg.data.source, cfg.data.seq_len)
"""


def test_an_installed_package_has_the_recipe(given, tmp_path, monkeypatch):
    """Without a clone's files next to the package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "medusa_jax").symlink_to(Path(own.__file__).parents[1])
    said = output_of(IN_A_WHEEL, *given, tmp_path, PYTHONPATH=str(tmp_path)).split()
    assert said[0].startswith(str(tmp_path))
    assert said[1:] == ["medusa1", f"{tmp_path}/text.jsonl", "128"]


def test_the_work_is_fitted_to_the_minutes(given, tmp_path, monkeypatch, capsys):
    """As many questions and steps as fit; fewer minutes, less work, never more than they."""
    costs = Costs(program=0.5, step=0.001, batch_step=1.0, token=0.002, learned=0.0005)
    monkeypatch.setattr("medusa_jax.evaluate.own_costs.measure", lambda *_: costs)
    found, seeds = [], read_seeds(given[1], "train", 0)
    for minutes in (None, 30.0, 9.0):
        flags = own.Flags(
            model=given[0], questions=given[1], out=str(tmp_path), minutes=minutes
        )
        job, _ = own.fitted(flags, seeds, own.recipe(flags, tmp_path))
        seconds = sum(job.seconds(costs).values())
        assert not minutes or seconds <= 60 * minutes
        found.append((job.questions, job.steps))
    assert found[0] == found[1] > found[2]
    with refused("too short on this machine: at least"):
        less = dataclasses.replace(flags, minutes=1.0)
        own.fitted(less, seeds, own.recipe(flags, tmp_path))


def test_kept_programs_do_not_shorten_the_estimate(given, monkeypatch):
    """Compiling is timed without caches, which work again afterwards."""
    model, found = load(given[0], "none"), []
    monkeypatch.setattr(programs, "store", store := object())

    def seconds(clock, engine):
        found.append((programs.store, jax.config.jax_enable_compilation_cache))
        return 1.0

    monkeypatch.setattr(StepClock, "seconds", seconds)
    measure(model, 4, 3, 0)
    assert found[0] == (None, False) and found[-1] == (None, True)
    assert programs.store is store


def test_what_cannot_be_done_is_refused_before_the_work(
    given, tmp_path, monkeypatch, capsys
):
    """An engine that is unknown or cannot load these heads; once it is corrected, the work goes on."""

    def refusal(*more):
        assert own.main([*given, f"--out={tmp_path / 'out'}", *more]) == 2
        return capsys.readouterr().err

    monkeypatch.setattr(own, "do_parts", lambda *_: tmp_path)
    assert "vlm" in refusal("--to=vlm,vllm")
    assert "--to sglang is for" in refusal("--to=vllm,sglang")
    assert "20 questions within --limit 20, 32 are needed" in refusal("--limit=20")
    assert "--start none has no heads" in refusal("--start=none")
    assert "config.json of a model" in refusal(f"--out={given[0]}")
    assert not Path(given[0], ".lock").exists()
    heads = Eagle3Config(n_heads=3, lm_head="own", rope_theta=50.0, n_layers=1)
    config, params = write_chat_model(tmp_path / "m", MARKED, max_position=128)
    set_template(tmp_path / "m", "")
    words = [str(tmp_path / "m"), given[1], f"--out={tmp_path / 'b'}"]
    assert own.main(words) == 2 and "no chat template" in capsys.readouterr().err
    write_heads(tmp_path / "heads", config, params, heads, ids=range(3, 30))
    start = f"--start={tmp_path / 'heads'}"
    assert "--start has eagle3 heads" in refusal(start, "--drafter=hydra")
    assert not (tmp_path / "out" / "start").exists()
    monkeypatch.setattr(own, "fitted", lambda *_: FITTED)
    assert own.main([*given, f"--out={tmp_path / 'out'}"]) == 0
    plan = json.loads((tmp_path / "out" / "own.json").read_text())
    for damaged in ("{", "{}", "[]", json.dumps(plan | {"job": {}})):
        (tmp_path / "out" / "own.json").write_text(damaged)
        assert "own.json" in refusal()
    (tmp_path / "out" / "own.json").write_text(json.dumps(plan))
    assert own.main([*given, f"--out={tmp_path / 'out'}", "--to=vllm"]) == 0


def test_it_ends_with_a_command_that_can_be_pasted(given, tmp_path, monkeypatch, capsys):
    """Heads of a class of one's own are named with it."""
    monkeypatch.setattr(own, "fitted", lambda *_: FITTED)
    monkeypatch.setattr(own, "do_parts", lambda *_: tmp_path / "my heads")
    name = "examples.tiny_drafter:Tiny"
    assert own.main([*given, f"--out={tmp_path / 'out'}", f"--drafter={name}"]) == 0
    words = shlex.split(capsys.readouterr().err.split("next: medusa serve")[1])
    assert split_drafter(serve.main.parse(words).drafter) == (name, f"{tmp_path}/my heads")


def test_a_directory_is_for_one_model_its_questions_and_first_heads(
    tmp_path, monkeypatch, capsys
):
    """Their files may move; other content under the same names is refused, also after all is done."""
    monkeypatch.setattr(own, "fitted", lambda *_: FITTED)
    monkeypatch.setattr(own, "do_parts", lambda *_: tmp_path)
    monkeypatch.chdir(tmp_path)
    config, params = write_chat_model(Path("m"), max_position=128)
    write_chat_model(Path("other"), max_position=128, seed=1)
    write_heads(Path("old"), config, params, seed=1)
    asked = write_lines(Path("asked.jsonl"), ({"turns": [word]} for word in WORDS))

    def refusal(*words):
        status = own.main([*words, f"--out={tmp_path / 'out'}"])
        return capsys.readouterr().err if status else ""

    words = ["m", "asked.jsonl", "--start=old"]
    assert refusal(*words) == ""
    shutil.copytree("old", "old 2")
    asked.rename("asked 2.jsonl")
    assert "asked.jsonl" in refusal(*words)
    moved = [f"{tmp_path}/m/", "./asked 2.jsonl", "--start=old 2"]
    assert refusal(*moved) == ""
    write_lines(asked, ({"turns": [word]} for word in WORDS[1:]))
    assert "out was started with questions '" in refusal(*words)
    write_heads(Path("old"), config, params, seed=2)
    assert "out was started with start '" in refusal(*moved[:2], words[2])
    shutil.rmtree("m")
    Path("other").rename("m")
    old = fingerprint(config, params)
    assert f"out was started with model {old!r}, now it is '" in refusal(*moved)


@pytest.mark.wide
def test_heads_are_rebuilt_after_a_fine_tuning(given, tmp_path, monkeypatch, capsys):
    """Starting from heads of the earlier model, whose fingerprint differs; stopped in training, resumed, converted.

    In a directory whose name has the marks of lists and trees.
    """
    old, tuned, out = tmp_path / "old", tmp_path / "tuned", tmp_path / "a,b@c"
    write_ending_model(old, max_position=128, seed=1, n_layers=8)
    config, _ = write_chat_model(tuned, MARKED, max_position=128, n_layers=8)
    heads = Eagle3Config(n_heads=3, lm_head="own", rope_theta=50.0, n_layers=1)
    write_heads(
        tmp_path / "heads", config, random_params(config, 1), heads, ids=range(3, 30)
    )
    monkeypatch.setattr(own, "fitted", lambda *_: FITTED)
    evaluate, killed = Evaluator.__call__, []

    def stopped(*args):
        if not killed:
            killed.append(1)
            raise KeyboardInterrupt
        return evaluate(*args)

    monkeypatch.setattr(Evaluator, "__call__", stopped)
    more = {"start": tmp_path / "heads", "out": out, "to": ["eagle3"], "max_new_tokens": 12}
    with pytest.raises(KeyboardInterrupt):
        sft_draft(tuned, given[1], **more)
    text = (out / "text" / "messages.jsonl").read_bytes()
    result = sft_draft(tuned, given[1], **more)
    assert killed and (out / "text" / "messages.jsonl").read_bytes() == text
    meta = json.loads(Path(result, "heads.json").read_text())
    assert meta["heads"]["drafter"] == "eagle3" and meta["heads"]["rope_theta"] == 50.0
    assert meta["recipe"]["step"] == 8 and "start" in meta["recipe"]
    assert verify.main([f"--model={tuned}", f"--drafter={result}"]) == 0
    assert (out / "eagle3" / "model.safetensors").exists()
    assert "answers: done before" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["messages.jsonl", "samples.jsonl"])
def test_text_that_has_not_changed_is_not_written_again(tmp_path, name):
    """Training finds the tokens of a text by its files' times."""
    record = {"prompt_ids": [1], "token_ids": [2, 3], "answers": ["a"]}

    def times_with(n):
        (tmp_path / name).write_text(f"{json.dumps(record)}\n" * n)
        source, *held_out = own.split(tmp_path)
        files = [*([source] if source.is_file() else sorted(source.iterdir())), *held_out]
        return {file: file.stat().st_mtime_ns for file in files if file.is_file()}

    first = times_with(own.HELD_OUT + 2)
    assert len(first) > 1 and times_with(own.HELD_OUT + 2) == first
    assert times_with(own.HELD_OUT + 3) != first
