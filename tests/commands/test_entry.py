"""What an entry point says of a Python without packages, and of bugs."""

import errno
import sys
from pathlib import Path

import pytest
from children import run

from medusa_jax.commands.entry import run_main


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
