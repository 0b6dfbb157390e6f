"""What is typed at a terminal, a real one (`pty`): editing, history, pastes."""

import ast
import os
import pty
import select
import stat
import subprocess
import sys
import time

import pytest
from children import environment

from medusa_jax.commands.turn_input import TurnInput

READER = """
from medusa_jax.commands.turn_input import TurnInput
turns = TurnInput()
while True:
    try:
        print("GOT", ascii(turns.read()), flush=True)
    except EOFError:
        break
"""
PASTE = b"\x1b[200~def f(x):\r    return x\r\rf(1)\x1b[201~"
UP, LEFT, ENTER, END = b"\x1b[A", b"\x1b[D", b"\r", b"\x04"
CODE = "def f(x):\n    return x\n\nf(1)"


@pytest.fixture
def typed(tmp_path):
    """Type these keys, each once the turn before has been read; returns the turns."""

    def run(*keys, term="xterm"):
        ours, theirs = pty.openpty()
        child = subprocess.Popen(
            [sys.executable, "-c", READER],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment() | {"XDG_CACHE_HOME": str(tmp_path), "TERM": term},
            start_new_session=True,
        )
        os.close(theirs)
        shown, deadline = b"", time.monotonic() + 30
        try:
            for n, some in enumerate([*keys, END]):
                while shown.count(b"> ") <= n and time.monotonic() < deadline:
                    if select.select([ours], [], [], 0.1)[0]:
                        shown += os.read(ours, 65536)
                time.sleep(0.02)  # the terminal has left its line mode
                os.write(ours, some)
            child.wait(timeout=max(1, deadline - time.monotonic()))
            while select.select([ours], [], [], 0)[0]:
                shown += os.read(ours, 65536)
        except OSError:  # the terminal of a program that has ended
            pass
        finally:
            child.kill()
            child.wait()
            os.close(ours)
        lines = shown.decode(errors="replace").splitlines()
        return [ast.literal_eval(line[4:]) for line in lines if line[:4] == "GOT "]

    return run


def test_lines_are_edited_and_a_marked_paste_is_one_turn(typed):
    assert typed(b"helo" + LEFT + b"l" + ENTER, PASTE + ENTER) == ["hello", CODE]


def test_turns_are_remembered_by_the_next_chat_of_this_user_alone(typed, tmp_path):
    typed(b"one" + ENTER, b"two" + ENTER, b"two" + ENTER)
    file = tmp_path / "medusa_jax" / "chat" / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert typed(UP + ENTER, UP + UP + UP + b"!" + ENTER) == ["two", "one!"]


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_lines_that_come_at_once_are_one_turn(typed, term):
    """A terminal that does not mark what is pasted."""
    got = typed(b"one\ntwo\nthree\n", b"four\n", term=term)
    assert got == ["one\ntwo\nthree", "four"]


def test_a_file_says_a_turn_a_line(monkeypatch, tmp_path, capsys):
    (tmp_path / "turns").write_text("\ufeffone\n two \n\nthree")
    with open(tmp_path / "turns") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        turns = TurnInput()
        assert [turns.read() for _ in range(4)] == ["one", "two", "", "three"]
        with pytest.raises(EOFError):
            turns.read()
    assert capsys.readouterr() == ("", "")  # no question is asked
