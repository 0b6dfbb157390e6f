"""What an entry point says of a Python without packages, and of bugs."""

import dataclasses
import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from children import run

from medusa_jax.commands.entry import run_main
from medusa_jax.commands.flags import CommandLine, flag
from medusa_jax.progress import ProgressBar


@pytest.mark.parametrize(
    "words",
    [
        ["decode.py", "--prompt", "a"],
        ["train.py", "--config=configs/demo_backbone.py", "--workdir=nowhere"],
    ],
)
def test_a_python_without_the_packages_is_told_in_one_line(words, monkeypatch):
    """-S leaves out what is installed, as the system's Python lacks it."""
    monkeypatch.chdir(Path(__file__).parents[2])
    done = run(sys.executable, "-S", *words, PYTHONPATH=".")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"which this Python ({sys.executable}) does not have" in done.stderr
    assert done.stderr.startswith("error: medusa_jax needs ")
    assert "pip install medusa-jax" in done.stderr


def test_bugs_are_not_taken_for_bad_input():
    def main():
        raise OSError(errno.EBADF, "of a descriptor that a bug has closed")

    with pytest.raises(OSError, match="a bug has closed"):
        run_main(main)
    with pytest.raises(ModuleNotFoundError, match=r"jax\.nothing"):
        run_main(lambda: __import__("jax.nothing"))


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]
)
def test_a_signal_ends_a_command_in_two_sentences(number, name, capsys):
    """After how much, and what goes on; the handler that was there is back."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # jobs in the background ignore it
    before = signal.getsignal(signal.SIGTERM)

    def work(flags):
        with ProgressBar("answers", 9, "seed") as bar:
            bar.update(4)
            os.kill(os.getpid(), number)
            time.sleep(5)
        return 0

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Flags:
        """Works."""

        out: str = flag("a file")

    program = CommandLine("medusa work", Flags, work, resumes=True)
    assert program(["--out=a b"]) == 128 + number
    *_, stopped, again = capsys.readouterr().err.splitlines()
    assert stopped == f"answers: stopped by {name} after 4 of 9 seeds"
    assert again == "finished work is kept; to go on: medusa work '--out=a b'"
    assert signal.getsignal(signal.SIGTERM) is before
