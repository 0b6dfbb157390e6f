"""What a run tells: the log after a resume, its clock."""

import json
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from medusa_jax.errors import UserError
from medusa_jax.training.log import curves, run_log
from medusa_jax.training.log.curves import read_log, series
from medusa_jax.training.log.run_log import RunLog


def test_a_resumed_log_drops_what_came_after_the_checkpoint(tmp_path):
    log = RunLog(str(tmp_path), 0, 10, 8)
    for step in range(1, 6):
        log.train(step, {"loss": [1.0 / step], "lr": 0.1})
    log.close()
    with open(tmp_path / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill
    log = RunLog(str(tmp_path), 3, 10, 8)
    log.train(4, {"loss": [9.0], "lr": 0.1})
    log.close()
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").open()]
    assert [r["step"] for r in records] == [1, 2, 3, 4] and records[-1]["loss"] == [9.0]


def test_time_aside_does_not_count(tmp_path):
    log = RunLog(str(tmp_path), 0, 10, 8)
    with log.paused():
        time.sleep(0.2)
    log.train(1, {"loss": 1.0})
    log.close()
    assert log.rate > 10


def test_curves_by_head():
    records = [
        {"step": 1, "kind": "train", "loss": [3.0, 4.0], "lm_loss": 2.0},
        {"step": 5, "kind": "eval", "loss": [2.0, 3.0]},
        {"step": 9, "kind": "train", "loss": [1.0, 2.0], "lm_loss": 1.5},
    ]
    assert series(records, "train", ("loss", "lm_loss")) == {
        "head 1": ([1, 9], [3.0, 1.0]),
        "head 2": ([1, 9], [4.0, 2.0]),
        "backbone": ([1, 9], [2.0, 1.5]),
    }
    assert series(records, "eval", ("loss",))["head 2"] == ([5], [3.0])
    assert series(records[:1], "train", ("lr",)) == {}
    bad = [{"step": 2, "kind": "train", "loss": [None, 1.0]}]
    assert np.isnan(series(bad, "train", ("loss",))["head 1"][1][0])


def drawn(monkeypatch, records, path):
    """The axes of the picture."""
    kept = []
    save = curves.save_figure
    monkeypatch.setattr(
        curves, "save_figure", lambda f, path: kept.append(f) or save(f, path)
    )
    curves.draw_run(records, path)
    return kept[0].axes


def test_no_panel_is_empty(tmp_path, monkeypatch):
    """Five figures, as a backbone's training has them: five panels, whatever the grid."""
    names = ("lm_loss", "lm_top1", "lm_top5", "lr", "gradient_norm")
    records = [
        {"step": step, "kind": "train"} | dict.fromkeys(names, 1.0 / step)
        for step in range(1, 4)
    ]
    axes = drawn(monkeypatch, records, tmp_path / "curves.png")
    assert [len(a.lines) for a in axes] == [1] * 5


def test_long_curves_are_smoothed(tmp_path, monkeypatch):
    """Thick and between the neighbours; the learning rate stays as it is."""
    records = [
        {"step": step, "kind": "train", "loss": [float(step % 2)], "lr": 0.1}
        for step in range(1, 42)
    ]
    loss, rate = drawn(monkeypatch, records, tmp_path / "curves.png")
    raw, smooth = loss.lines
    assert len(rate.lines) == 1 and raw.get_linewidth() < smooth.get_linewidth()
    assert list(raw.get_ydata()) == [float(step % 2) for step in range(1, 42)]
    assert smooth.get_ydata()[20] == pytest.approx(1 / 3) and smooth.get_ydata()[0] == 0.5
    assert len(loss.get_legend_handles_labels()[1]) == 1
    bad = curves.smoothed([1.0, float("nan"), 3.0])
    assert bad == [1.0, 2.0, 3.0]
    assert np.isnan(curves.smoothed([float("nan")] * 3)).all()


def log_some(workdir, **options):
    log = RunLog(str(workdir), 0, 10, 8, **options)
    for step in range(1, 6):
        log.train(step, {"loss": [1.0 / step, 2.0], "top1": [0.1, 0.2], "lr": 0.1})
    log.evaluation(5, {"loss": [0.3, 0.9], "top1": [0.5, 0.2], "accepted_length_tree": 1.6})
    return log


def test_a_picture_at_every_evaluation(tmp_path, capsys):
    log = log_some(tmp_path, curves=True)
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    log.train(6, {"loss": [5.0, 2.0], "top1": [0.1, 0.2], "lr": 0.1})
    log.close()
    assert (tmp_path / "curves.png").read_bytes() != picture
    assert len(read_log(tmp_path / "log.jsonl")) == 7
    assert "accepted_length_tree 1.6" in capsys.readouterr().err


def test_a_run_goes_on_without_pictures(tmp_path, capsys, monkeypatch):
    def fails(*_):
        raise UserError("drawing charts needs matplotlib")

    monkeypatch.setattr(run_log, "draw_run", fails)
    log_some(tmp_path, curves=True).close()
    assert capsys.readouterr().err.count("no curves.png: drawing charts needs") == 1


class FakeWandb:
    """Records what a run is sent."""

    def __init__(self):
        self.starts, self.logged, self.finished = [], [], 0

    def init(self, **options):
        self.starts.append(options)
        return SimpleNamespace(id=options["id"] or "abc", log=self.log, finish=self.finish)

    def log(self, scalars, step):
        self.logged.append((step, scalars))

    def finish(self):
        self.finished += 1


def test_weights_and_biases_only_when_asked_for(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log_some(tmp_path).close()
    assert not fake.starts
    for _ in range(2):  # the second time it resumes
        log_some(tmp_path, wandb="mine", config={"x": 1}).close()
    assert [s["id"] for s in fake.starts] == [None, "abc"]
    assert fake.starts[0]["project"] == "mine" and fake.starts[0]["config"] == {"x": 1}
    assert fake.logged[0] == (1, {"train/loss/head_1": 1.0, "train/loss/head_2": 2.0,
                                  "train/top1/head_1": 0.1, "train/top1/head_2": 0.2,
                                  "train/lr": 0.1})  # fmt: skip
    assert fake.finished == 2


def test_weights_and_biases_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        RunLog(str(tmp_path), 0, 10, 8, wandb="mine")


def test_a_full_disk_is_one_sentence_and_closing_says_no_other(tmp_path):
    """The log's file and TensorBoard's, neither of which can be written any more."""
    log = RunLog(str(tmp_path), 0, 10, 8)
    for sink in ("board", "file"):
        if sink == "board":
            log.board.writer._py_recordio_writer._writer = open("/dev/full", "wb")  # noqa: SIM115
        else:
            log.file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
        with pytest.raises(UserError, match="could not be written: No space left on"):
            log.evaluation(1, {"loss": [1.0], "lr": 0.1})
    log.close()


def test_tensorboard_reads_what_was_logged(tmp_path):
    for start, losses in (
        (0, [3.0, 2.0, 9.0]),
        (2, [1.0]),
    ):  # stopped after 3, resumed from 2
        (tmp_path / str(start)).mkdir()
        log = RunLog(str(tmp_path / str(start)), start, 10, 8)
        for step, loss in enumerate(losses, start + 1):
            log.train(step, {"loss": [loss, 0.5], "lr": 0.1})
        log.close()
    events = [event for start in "02" for event in read_events(tmp_path / start)]
    assert [(step, values) for step, values in events if values] == [
        (step, {"train/loss/head_1": loss, "train/loss/head_2": 0.5, "train/lr": 0.1})
        for step, loss in ((1, 3.0), (2, 2.0), (3, 9.0), (3, 1.0))
    ]


def read_events(workdir):
    """(step, scalars) of the events of the only file; the framing is TFRecord's."""
    from tensorboardX.proto.event_pb2 import Event

    [file] = (workdir / "tensorboard").iterdir()
    content, at = file.read_bytes(), 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 8], "little")
        event = Event.FromString(content[at + 12 : at + 12 + size])
        yield event.step, {v.tag: round(v.simple_value, 6) for v in event.summary.value}
        at += 16 + size
