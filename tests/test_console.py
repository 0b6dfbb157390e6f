"""Standard streams that are closed, full, or of any encoding."""

import json
import sys

import pytest
from children import run

from medusa_jax import console

# Standard streams: a shell may close them, or send them to a full disk. The program prints a result
# and a message, and opens a file between: without care its number is that of a closed stream.
PROGRAM = """
import sys, tempfile
from medusa_jax import console
from medusa_jax.commands.entry import run_main
from medusa_jax.console import inform
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


def test_messages_after_a_block(capsys):
    with console.messages_after():
        console.inform("a message")
        print("a result")
        assert not capsys.readouterr().err
    assert capsys.readouterr().err == "a message\n"


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
