"""The log of a run after a resume, its clock, and what else the records go to."""

import json
import time

import numpy as np
import pytest

from medusa_jax.errors import UserError
from medusa_jax.training.run_log import RunLog, finite, outlook, read_log


def opened(workdir, start=0):
    log = RunLog(str(workdir), start, 10, 8)
    log.open()
    return log


def test_a_resumed_log_drops_what_came_after_the_checkpoint(tmp_path):
    log = opened(tmp_path)
    for step in range(1, 6):
        log.train(step, {"loss": [1.0 / step, 2.0], "top1": [0.1, 0.2], "lr": 0.1})
    log.evaluation(5, {"loss": [0.3, 0.9], "top1": [0.5, 0.2], "accepted_length_tree": 1.6})
    log.close()
    with open(tmp_path / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill
    log = opened(tmp_path, 3)
    log.train(4, {"loss": [9.0, np.inf], "lr": 0.1})
    log.close()
    records = read_log(tmp_path / "log.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert records[-1]["loss"] == [9.0, None]


def test_finite_writes_null():
    record = {"a": float("nan"), "b": [1.0, float("inf")], "c": 3, "d": True}
    assert finite(record) == {"a": None, "b": [1.0, None], "c": 3, "d": True}


def test_time_aside_does_not_count(tmp_path):
    log = opened(tmp_path)
    with log.paused():
        time.sleep(0.2)
    log.train(1, {"loss": 1.0})
    log.close()
    assert log.rate > 10


def test_a_full_disk_is_one_sentence_and_closing_says_no_other(tmp_path):
    """The log's file and TensorBoard's, neither of which can be written any more."""
    log = opened(tmp_path)
    for sink in ("board", "file"):
        full = open("/dev/full", "wb" if sink == "board" else "w")  # noqa: SIM115
        if sink == "board":
            log.board.writer._py_recordio_writer._writer = full
        else:
            log.file = full
        with pytest.raises(UserError, match="could not be written: No space left on"):
            log.evaluation(1, {"loss": [1.0], "lr": 0.1})
    log.close()


def test_tensorboard_reads_what_was_logged(tmp_path):
    # Stopped after 3, resumed from 2.
    for start, losses in ((0, [3.0, 2.0, 9.0]), (2, [1.0])):
        (tmp_path / str(start)).mkdir()
        log = opened(tmp_path / str(start), start)
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


def test_whether_longer_training_helps(tmp_path):
    def after(*lengths):
        records = [
            {"step": 50 * (i + 1), "kind": "eval", "accepted_length_tree": x}
            for i, x in enumerate(lengths)
        ]
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return outlook(tmp_path)

    assert after(1.5) == ""
    assert after(1.5, 1.6).endswith(
        "1.50, then 1.60 at step 100: longer training helps, e.g. --config.train.steps=200"
    )
    assert "more text or another family of heads helps more" in after(1.5, 1.7, 1.71)
