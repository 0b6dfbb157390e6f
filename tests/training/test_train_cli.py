"""The command line: overrides, signals, the dry run and the sample that it shows."""

import json
import os
import shlex
import signal
import sys

import pytest
from small_disk import run_on_small_disk
from training_setup import ROOT, command, records, tiny_config, write_config

from medusa_jax.commands import train as cli
from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError
from medusa_jax.text.tokenizer import load_tokenizer
from medusa_jax.training import dry, trainer
from medusa_jax.training.dry import mark_counted, preview
from medusa_jax.training.plan import RunPlan


@pytest.mark.wide
@pytest.mark.usefixtures("compiled_once")
def test_a_signal_saves_and_says_what_goes_on(tokens, tmp_path, monkeypatch, capsys):
    """Once: after its step; Ctrl-C twice: at once. The command that is named goes on to the end."""
    look = trainer.Run.record_step
    presses = {1: [signal.SIGTERM], 3: [signal.SIGINT], 6: [signal.SIGINT] * 2}

    def pressed(self, pending):
        for number in presses.pop(pending[0], ()) if pending else ():
            os.kill(os.getpid(), number)
        return look(self, pending)

    monkeypatch.setattr(trainer.Run, "record_step", pressed)
    workdir = tmp_path / "of mine"
    args = [f"--config={write_config(tmp_path, tokens)}", f"--workdir={workdir}",
            "--config.train.steps=8", "--config.train.save_every=100"]  # fmt: skip
    before = signal.getsignal(signal.SIGINT)
    for number, step, words in (
        (signal.SIGTERM, 2, "stopped by SIGTERM after step 2;"),
        (signal.SIGINT, 4, "stopped by Ctrl-C after step 4;"),
        (signal.SIGINT, 4, "stopped at once; the last checkpoint is of step 4"),
    ):
        assert cli.main(args) == 128 + number
        said = capsys.readouterr().err
        assert words in said
        assert ("Ctrl-C again stops at once" in said) == (number == signal.SIGINT)
        assert (workdir / "checkpoints" / str(step)).is_dir()
        named = said.splitlines()[-1].partition("; to go on: medusa train ")[2]
        assert shlex.split(named) == args
    assert cli.main(shlex.split(named)) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert [r["step"] for r in records(workdir)] == list(range(1, 9))


def test_without_arguments_it_says_what_to_give(capsys):
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert "set --config.model.path" in said and "see --help" in said


def test_dry_run_prints_sizes_before_it_compiles(
    tokens, vicuna, sharegpt, tmp_path, monkeypatch, capsys
):
    """Stored memory and the mesh as well; first a sample of the text, if there is one."""
    shown, ends = [], [KeyboardInterrupt(), UserError("compiles"), UserError("compiles")]

    def compile_step(*_):
        shown.append(capsys.readouterr().out)
        raise ends.pop()

    monkeypatch.setattr(dry, "compile_step", compile_step)
    file = write_config(tmp_path, tokens, "medusa1")
    assert cli.main([f"--config={file}", "--config.dry_run"]) == 2
    recipe = [f"--config={ROOT}/configs/vicuna7b_m1.py", "--config.dry_run"]
    recipe += [f"--config.model.path={vicuna}", f"--config.data.source={sharegpt}"]
    assert cli.main([*recipe, "--config.data.seq_len=256"]) == 2
    said, with_sample = shown
    assert cli.main([f"--config={file}", "--config.dry_run"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err.endswith("stopped by Ctrl-C\n")  # nothing goes on
    assert "of them counted" in with_sample and "counted" not in said
    assert "devices: data 1, fsdp 1, tensor 1" in said and "trainable" in said
    cfg = tiny_config(tokens, "medusa1")
    shapes = dry.shapes_of(RunPlan(cfg, dry=True))
    groups = (shapes.frozen, shapes.state.params, shapes.state.opt, shapes.batch)
    stored = sum(dry.stored_bytes(part) for part in groups)
    assert sum(dry.sizes(shapes)["stored"].values()) == stored
    assert f"= {dry.byte_size(stored)}" in said and "stored per device" in said


FOREIGN = {
    "config.json": [
        "not JSON",
        "[]",
        '{"train": {"epochs": 3}}',
        '{"model_type": "llama"}',
        "\udcff",
    ],
    "log.jsonl": ["a log\nof mine\n", '{"loss": 1}\n', "[1]\n", "\udcff\n", "\n{}"],
    "export/heads.json": ["{}"],
    "best/config.json": ["{}"],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in FOREIGN.items() for text in texts]
)
def test_files_that_no_run_has_written_are_refused(name, text, tokens, tmp_path, capsys):
    """Before a model is read; they are unchanged."""
    file, data = tmp_path / "run" / name, text.encode(errors="surrogateescape")
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    config = write_config(tmp_path, tokens, "medusa1")
    assert cli.main([f"--config={config}", f"--workdir={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert file.read_bytes() == data and str(tmp_path / "run") in said
    assert "give another place" in said or "log.jsonl" in said


@pytest.mark.wide
@pytest.mark.parametrize("size", ["100k", "240k", "330k", "400k"])
def test_a_full_disk_is_one_sentence(tokens, tmp_path, size):
    """Whatever meets it first: a checkpoint, the best heads, the log, TensorBoard's events."""
    config, disk = write_config(tmp_path, tokens, "medusa1"), tmp_path / "disk"
    disk.mkdir()
    args = (f"--workdir={disk}/run", "--config.train.steps=3000")
    done = run_on_small_disk(size, disk, *command(f"--config={config}", *args))
    said = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
    assert done.returncode == 2 and len(said) in (1, 2), done.stderr[-3000:]
    assert "No space left on device" in said[-1]


def test_a_configuration_that_builds_on_another_is_found_from_anywhere(
    tmp_path, monkeypatch
):
    """As `medusa train` is called: the project's root is not on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p not in ("", str(ROOT))])
    for name in [n for n in sys.modules if n.partition(".")[0] == "configs"]:
        monkeypatch.delitem(sys.modules, name)
    before = list(sys.path)
    given = [f"--config={ROOT}/configs/demo_native.py", "--workdir=w"]
    assert cli.parse(given).train.stage == "native"
    assert sys.path == before


def test_values_of_a_tuple_have_the_types_of_its_field():
    given = {"window_layers": "true,false", "rope_short": "(1.5, 2)", "rotated_layers": ""}
    args = [f"--config.model.arch.{name}={value}" for name, value in given.items()]
    cfg = cli.parse([f"--config={ROOT}/configs/demo_native.py", "--workdir=w", *args])
    read = [getattr(cfg.model.arch, name) for name in given]
    assert read == [(True, False), (1.5, 2.0), ()]


def shown(vicuna, source, seq_len=256):
    return preview(DataConfig(str(source), seq_len=seq_len, chat_template="vicuna"), vicuna)


def test_the_assistant_s_words_are_marked_and_nothing_else(vicuna, sharegpt):
    text, legend = shown(vicuna, sharegpt).split("-" * 60)
    assert (
        "USER: What is a tree? ASSISTANT:⟦ A tree is a graph without cycles.</s>⟧USER:"
        in text
    )
    assert text.count("⟦") == 2 and text.rstrip().endswith("side by side.</s>⟧")
    ids = load_tokenizer(vicuna).encode(text.replace("⟦", "").replace("⟧", "").strip())
    assert f"sample 1 of 9 in {sharegpt}" in legend and f"of {len(ids)} tokens, " in legend


def test_line_breaks_inside_an_answer_are_seen(vicuna):
    tokenizer = load_tokenizer(vicuna)
    ids = tokenizer.encode("a é\nb")
    counted = [False, *[True] * (len(ids) - 1)]
    assert mark_counted(tokenizer, ids, counted).count("↵⟧\n⟦b⟧") == 1


def test_a_cut_sample_is_shown_cut_and_unusable_ones_are_skipped(vicuna, tmp_path):
    source = tmp_path / "talk.jsonl"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo " * 90}]
    source.write_text("{broken\n" + json.dumps({"messages": talk}))
    said = shown(vicuna, source, 240)
    assert "sample 2 of 2" in said and ": 240 of " in said
    source.write_text("{broken\n")
    with pytest.raises(UserError, match=r"none of the 1 samples .*broken JSON"):
        shown(vicuna, source)
