"""What entry points share: the warning about an idle accelerator, standard streams, missing packages, progress."""

import errno
import json
import os
import sys
from pathlib import Path

import jax
import pytest
from children import run

from medusa_jax import console, progress
from medusa_jax.progress import Progress


def test_an_accelerator_that_jax_does_not_use_is_told(monkeypatch, capsys):
    monkeypatch.setattr(os.path, "exists", lambda other: other == "/dev/nvidia0")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    console.warn_if_accelerator_unused()
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("warning: ") and err.count("\n") == 1
    assert "jax[cuda12]" in err


# Standard streams: a shell may close them, or send them to a full disk. The program prints a result
# and a message, and opens a file between: without care its number is that of a closed stream.
PROGRAM = """
import sys, tempfile
from medusa_jax import console
from medusa_jax.console import inform, run_main
def main():
    with tempfile.TemporaryFile("w+") as file:
        inform("a message")
        {body}
        file.seek(0)
        assert file.read() == ""
    return 0
sys.exit(run_main(main))
"""
PRINT = 'print("a result")'
FULL = "cannot write: No space left on device"


def run_shell(words, redirection="", **variables):
    """Run a command line in a shell; returns its status, stdout and stderr."""
    done = run("bash", "-c", f'"$@" {redirection}', "bash", *words, stdin="", **variables)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("body", "redirection", "status", "out", "err"),
    [
        (PRINT, "", 0, "a result", "a message"),
        (PRINT, "2>&-", 0, "a result", ""),
        (PRINT, "2>/dev/full", 0, "a result", ""),
        (PRINT, ">/dev/full", 2, "", f"a message\nerror: {FULL}"),
        (PRINT, "| true", 0, "", "a message"),
    ],
)
def test_streams_that_are_closed_or_full(body, redirection, status, out, err):
    words = [sys.executable, "-c", PROGRAM.format(body=body)]
    if "|" in redirection:
        redirection += "; exit ${PIPESTATUS[0]}"
    got = run_shell(words, redirection)
    assert got[:2] == (status, out and out + "\n"), got
    assert got[2].endswith(err and err + "\n") and got[2].count("\n") <= 2, got


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_every_encoding_prints_every_text(encoding):
    """Text is escaped; JSON stays JSON."""
    text = "\u65e5\U0001f40d"
    body = f"print({text!a}); console.print_json(dict(text={text!a}))"
    words = [sys.executable, "-c", PROGRAM.format(body=body)]
    status, out, _ = run_shell(words, PYTHONIOENCODING=encoding)
    shown, line = out.splitlines()
    assert status == 0 and shown == "\\u65e5\\U0001f40d"
    assert json.loads(line) == {"text": text}


@pytest.mark.parametrize(
    "words",
    [
        ["decode.py", "--prompt", "a"],
        ["train.py", "--config=configs/demo_backbone.py", "--workdir=nowhere"],
    ],
)
def test_a_python_without_the_packages_is_told_in_one_line(words, monkeypatch):
    """-S leaves out what is installed, as the system's Python lacks it."""
    monkeypatch.chdir(Path(__file__).parents[1])
    status, out, err = run_shell([sys.executable, "-S", *words], PYTHONPATH=".")
    assert status == 2 and out == "" and err.count("\n") == 1, err
    assert f"which this Python ({sys.executable}) does not have" in err
    assert err.startswith("error: medusa_jax needs ") and "pip install medusa-jax" in err


def test_bugs_are_not_taken_for_bad_input():
    def main():
        raise OSError(errno.EBADF, "of a descriptor that a bug has closed")

    with pytest.raises(OSError, match="a bug has closed"):
        console.run_main(main)
    with pytest.raises(ModuleNotFoundError, match=r"jax\.nothing"):
        console.run_main(lambda: __import__("jax.nothing"))


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """A directory of temporary files of this test."""
    monkeypatch.setattr(console.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    console._scratch.cache_clear()
    return tmp_path / "tmp"


def mode(path):
    return os.stat(path).st_mode & 0o777


@pytest.mark.parametrize(
    ("xdg", "home", "where"),
    [
        ("{tmp}/xdg", "{tmp}/home", "xdg/medusa_jax"),
        ("relative/cache", "{tmp}/home", "home/.cache/medusa_jax"),
        ("", "~", f"tmp/medusa_jax-{os.geteuid()}"),
    ],
)
def test_caches_are_in_absolute_places(xdg, home, where, temporary, monkeypatch, tmp_path):
    """A HOME that is not set and that no user has stays "~"; what is relative is ignored, as XDG says."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", xdg.format(tmp=tmp_path))
    monkeypatch.setenv("HOME", home.format(tmp=tmp_path))
    path = console.cache_directory("native")
    assert path == str(tmp_path / where / "native")
    assert mode(path) == mode(os.path.dirname(path)) == 0o700
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("part", ["", "native"])
def test_a_cache_of_another_user(part, temporary, monkeypatch, tmp_path):
    """What it holds is not used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = tmp_path / "medusa_jax" / "native"
    assert console.cache_directory("native") == str(ours)
    ours.chmod(0o777)
    assert console.cache_directory("native") == str(ours) and mode(ours) == 0o700
    os.chown(ours.parent / part, 12345, 12345, follow_symlinks=False)
    second = temporary / f"medusa_jax-{os.geteuid()}"
    assert console.cache_directory("native") == str(second / "native")
    os.chown(second, 12345, 12345)
    path = console.cache_directory("native")
    assert path == console.cache_directory("native") and mode(path) == 0o700
    assert os.path.dirname(path) not in (str(second), str(ours.parent))
    assert path.startswith(str(temporary))


def test_lines_where_there_is_no_terminal(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    with Progress("timing trees", 10, "run") as bar:
        bar.update()
        assert not capsys.readouterr().err  # too soon
        clock[0] = 11.0
        bar.update()
        assert capsys.readouterr().err == "timing trees: 2 of 10 runs, 44 seconds left\n"
        clock[0] = 300.0
        bar.update(3)
        assert capsys.readouterr().err == "timing trees: 5 of 10 runs, 5 minutes left\n"
