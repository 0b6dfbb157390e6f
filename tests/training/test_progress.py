"""What a run tells: durations, the log after a resume, its clock."""

import json
import time

from medusa_jax.training.progress import Progress, duration


def test_durations():
    assert [duration(s) for s in (-1, 59, 61, 4000)] == ["0s", "59s", "1m01s", "1h06m"]


def test_a_resumed_log_drops_what_came_after_the_checkpoint(tmp_path):
    log = Progress(str(tmp_path), 0, 10, 8)
    for step in range(1, 6):
        log.train(step, {"loss": [1.0 / step], "lr": 0.1})
    log.close()
    with open(tmp_path / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill
    log = Progress(str(tmp_path), 3, 10, 8)
    log.train(4, {"loss": [9.0], "lr": 0.1})
    log.close()
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").open()]
    assert [r["step"] for r in records] == [1, 2, 3, 4] and records[-1]["loss"] == [9.0]


def test_time_aside_does_not_count(tmp_path):
    log = Progress(str(tmp_path), 0, 10, 8)
    with log.aside():
        time.sleep(0.2)
    log.train(1, {"loss": 1.0})
    log.close()
    assert log.rate > 10
