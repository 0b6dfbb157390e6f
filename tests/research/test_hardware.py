"""A first day on hardware keeps what it measured; the page of one step."""

import signal
import subprocess
import sys
import time

import pytest
from children import environment
from training_setup import ROOT

from research import walk
from research.hardware import summary
from research.hardware.record import Record, read_rows


@pytest.mark.wide
def test_the_page_of_one_step_is_the_commands_output(tmp_path, capsys):
    pictures = tmp_path / "pictures"
    assert walk.main(["--dtype", "float64", f"--pictures={pictures}"]) == 0
    assert {file.name for file in pictures.iterdir()} == {
        "tree.svg",
        "mask.svg",
        "step.svg",
    }
    assert capsys.readouterr().out == (ROOT / "docs" / "one_step.md").read_text()


@pytest.mark.slow
def test_what_was_measured_survives_a_kill(tmp_path):
    words = f"-m research hardware --small --out={tmp_path} --parts=facts,steps".split()
    process = subprocess.Popen(
        [sys.executable, *words], env=environment(), stdout=subprocess.PIPE, text=True
    )
    while len(read_rows(tmp_path)) < 3:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    kept = read_rows(tmp_path)
    assert len(kept) >= 3 and kept[0]["what"] == "machine"
    assert "## Memory" in printed and (tmp_path / "summary.md").read_text() in printed
    time.sleep(2)
    assert read_rows(tmp_path) == kept  # no process of a part goes on


def test_a_cut_line_and_an_error_are_no_end(tmp_path):
    record = Record(tmp_path, "steps", 100, small=True)
    record.row("weights", gb_per_second=1.0)
    with record.trying("step", drafter="medusa", batch=1):
        raise ValueError("no | memory\nleft")
    with open(record.path, "a") as file:
        file.write('{"part": "steps", "wh')
    first, second = read_rows(tmp_path)
    assert first["gb_per_second"] == 1.0
    assert second["error"] == "ValueError: no | memory\nleft"
    text = " ".join(summary.write_summary(tmp_path).split())
    assert "| steps | step | medusa 1 | ValueError: no / memory left |" in text
