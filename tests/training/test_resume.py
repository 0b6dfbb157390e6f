"""Every stage: stopped by SIGTERM, cut off without warning, poisoned, and still the same run."""

import dataclasses
import gc
import json
import os
import signal
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tensorstore
from cases import thinned
from training_setup import VOCAB, changes, records, run, tiny_config, training_arch

from medusa_jax.config import DataConfig, HeadsConfig
from medusa_jax.errors import Terminated, UserError
from medusa_jax.sharding import make_mesh
from medusa_jax.training import resume, trainer
from medusa_jax.training.checkpoint import Checkpoints
from medusa_jax.training.data.texts import read_texts
from medusa_jax.training.models import Setup
from medusa_jax.training.plan import RunPlan
from medusa_jax.training.step import TrainState
from medusa_jax.training.trainer import Run
from medusa_jax.whole_files import write_json

STAGES = ("backbone", "medusa1", "medusa2", "lora", "native", "packed moments")


def config(tokens, model, stage, **train):
    name = {"lora": "medusa2", "packed moments": "native"}.get(stage, stage)
    cfg = tiny_config(tokens, name, **({"steps": 12, "save_every": 5} | train))
    cfg.heads = HeadsConfig(n_heads=2, lm_head="shared")
    if name != "native":
        cfg.model.path = model
    if stage == "packed moments":  # of matrices that are large enough to be packed
        cfg.model.arch = training_arch(d_model=64, d_ff=64, head_dim=32)
        cfg.optim.name = "adamw8bit"
    if stage == "medusa2":
        cfg.train.lambda_0_schedule, cfg.train.backbone_loss = "sine", "kl"
    if stage == "lora":
        cfg.optim.name, cfg.lora.rank, cfg.model.quantise = "adamw8bit", 2, "int8"
    return cfg


@pytest.fixture
def at(monkeypatch):
    """at({step: what to do before its metrics are looked at}), with the run as argument."""
    look = trainer.Run.record_step

    def when(acts):
        def watched(self, pending):
            if pending is not None and pending[0] in acts:
                acts[pending[0]](self)
            return look(self, pending)

        monkeypatch.setattr(trainer.Run, "record_step", watched)

    return when


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("stage", thinned(STAGES, "medusa1"))
def test_stopped_and_cut_runs_go_on_bit_for_bit(
    tokens, model, tmp_path, monkeypatch, at, stage
):
    """SIGTERM after step 3, a cut without warning after step 8, against an unbroken run.

    Nothing of the checkpoint of step 5 is written before step 8 is done: steps go on while a save
    is in flight, and what they donate and overwrite is not what is saved.
    """
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(config(tokens, model, stage), whole)
    open_array, free = tensorstore.open, threading.Event()

    def open_later(*args, **options):
        assert free.wait(300), "no step was made while the save was in flight"
        return open_array(*args, **options)

    def cut(_):
        assert [p.name for p in (broken / "checkpoints").glob("?")] == ["3"]
        free.set()
        raise KeyboardInterrupt

    at({2: lambda _: os.kill(os.getpid(), signal.SIGTERM)})
    with pytest.raises(Terminated):
        run(config(tokens, model, stage), broken)
    done = [r["step"] for r in records(broken)]
    assert done == list(range(1, 4)), "SIGTERM during step 3 saves and ends after it"
    free.set()
    monkeypatch.setattr(tensorstore, "open", open_later)
    at({4: lambda _: free.clear(), 8: cut})
    with pytest.raises(KeyboardInterrupt):
        run(config(tokens, model, stage), broken)
    assert max(int(p.name) for p in (broken / "checkpoints").iterdir()) == 5
    at({})
    run(config(tokens, model, stage), broken)
    assert records(broken) == records(whole) and len(records(whole)) == 12
    for file in (whole / "export").rglob("*.safetensors"):
        assert file.read_bytes() == (broken / file.relative_to(whole)).read_bytes(), file


@pytest.mark.wide
@pytest.mark.usefixtures("compiled_once")
def test_a_resumed_run_holds_its_state_alone(tokens, model, tmp_path, monkeypatch):
    """Neither a fresh state nor the model's weights, while a checkpoint is read and afterwards."""
    cfg, arch = config(tokens, model, "backbone", steps=1), training_arch()
    restore, found = Checkpoints.restore, []

    def look(*of_restore):
        gc.collect()
        found.append(sum(x.shape == (VOCAB, arch.d_model) for x in jax.live_arrays()))
        return restore(*of_restore) if of_restore else None

    run(cfg, tmp_path)
    look()
    monkeypatch.setattr(Checkpoints, "restore", look)
    checkpoints = Checkpoints(cfg.workdir, 1)
    resumed = Run(RunPlan(cfg), checkpoints)
    look()
    assert found == [found[0], found[0], found[0] + 3]  # the embedding, its two moments
    assert resumed.state is not None
    checkpoints.manager.close()


def begun(workdir):
    """A configuration that a run in `workdir` was begun with."""
    cfg = tiny_config("data")
    cfg.workdir = str(workdir)
    write_json(workdir / "config.json", dataclasses.asdict(cfg))
    return cfg


def leaves(value, prefix=""):
    for field in dataclasses.fields(value):
        x, name = getattr(value, field.name), prefix + field.name
        yield from leaves(x, name + ".") if dataclasses.is_dataclass(x) else [(value, name)]


def test_every_field_is_refused_or_logged_or_free(tmp_path):
    """Each by itself; nothing is silent but what nothing depends on."""
    cfg = begun(tmp_path)
    said = {}
    for owner, name in leaves(cfg):
        field = name.rpartition(".")[2]
        value = getattr(owner, field)
        other = type(value)(not value) if not isinstance(value, tuple) else (True,)
        other = (9, 9, 9) if name == "mesh" else other
        if name == "workdir":
            continue
        setattr(owner, field, other)
        try:
            said[name] = "logged" if changes(cfg) else "free"
        except UserError as error:
            said[name] = "refused"
            assert f"({name}: " in str(error) and "\n" not in str(error)
        setattr(owner, field, value)
    assert changes(cfg) == {}
    assert {name for name in said if said[name] == "free"} == {"dry_run"}
    refused = {"data.seed", "data.seq_len", "train.batch_size", "heads.n_heads"}
    refused |= {"optim.name", "model.arch.d_ff"}
    assert {said[name] for name in refused} == {"refused"}
    assert {said[name] for name in ("optim.lr", "train.steps", "data.source")} == {"logged"}


@pytest.mark.parametrize(
    ("name", "scored", "best"),
    [("optim.lr", {"data.eval_source": "old"}, np.inf), ("train.levels", {}, 1.5)],
)
def test_the_best_score_counts_while_scores_are_comparable(tmp_path, name, scored, best):
    """With more levels the score is the sum of more losses. A start that made no checkpoint changes nothing."""
    run, one = object.__new__(Run), np.int32(1)
    run.mesh = make_mesh()
    run.plan = RunPlan(begun(tmp_path), run.mesh, dry=True)
    run.steps, run.best, run.setup = 4, np.inf, Setup({}, {}, None)
    run.content = dict.fromkeys(resume.CONTENT)
    meta = {"step": 2, "updates": 2, "best": 1.5, "start": None, "bad_in_row": 0}
    meta["scored"] = resume.scored(run.plan.record) | scored
    saved = ({}, {}, {"step": 2} | run.content, meta)
    run.checkpoints = SimpleNamespace(restore=lambda params, opt: saved)
    run.restore(TrainState(one, one, {}, {}), {name: "1 -> 4"})
    assert run.best == best


def test_configurations_without_a_field_and_damaged_ones(tmp_path, capsys):
    cfg = begun(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["optim"]["lr"]
    write_json(tmp_path / "config.json", stored)
    assert changes(cfg) == {"optim.lr": f"None -> {cfg.optim.lr}"}
    (tmp_path / "config.json").write_text("{")
    assert changes(cfg) == {}
    assert "are not checked: config.json" in capsys.readouterr().err


def test_held_out_samples_are_not_of_the_text(tokens):
    """With data.eval_source they would be learned, from files that are the same."""
    cfg, found = DataConfig(tokens, seq_len=40, held_out=0.2), []
    for eval_source in ("", tokens):
        cfg.eval_source = eval_source
        [rows] = read_texts(cfg, "", "", VOCAB).train
        found.append({"step": 1} | resume.contents(8, rows, None, None))
    with pytest.raises(UserError, match="made with another share of samples held out"):
        resume.check(*found, 4, "w")


@pytest.mark.parametrize("name", resume.CONTENT)
def test_other_content_is_refused(name):
    saved = {"step": 4, "rows": 3, "batch_size": 8}
    saved |= {"text": 1, "kept_share": 0.1, "backbone": "a", "draft_vocab": 2}
    resume.check(saved, dict(saved), 4, "w")
    with pytest.raises(UserError, match="made with another"):
        resume.check(saved, saved | {name: None}, 4, "w")
