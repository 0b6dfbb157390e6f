"""HumanEval's programs, planted: right ones pass, wrong and greedy ones do not, nothing gets out."""

import socket

import pytest

from medusa_jax.errors import UserError
from medusa_jax.evaluate import programs

PROBLEM = {
    "prompt": 'import math\n\n\ndef area(r):\n    """Of a circle."""\n',
    "entry_point": "area",
    "test": "def check(candidate):\n    assert abs(candidate(2.0) - 12.566) < 1e-2\n",
}
BODY = "    return math.pi * r * r\n"


@pytest.mark.parametrize(
    "answer, right",
    [
        (BODY, 1.0),
        ("    return 3 * r * r\n", 0.0),
        # What follows the function is left out: a second one, a call, prose behind a comment.
        (BODY + "\ndef other(:\n", 1.0),
        (BODY + "\nprint(area(input()))", 1.0),
        (BODY + "\n# and so on\nso it is", 1.0),
        (
            "Sure:\n```python\ndef area(r):\n    return math.pi * r**2\n```\nIt is right.",
            1.0,
        ),
        ("```python\n" + BODY + "```", 1.0),
        ("I cannot write programs.", 0.0),
        ("    exit()\n", 0.0),  # ends before its tests, with status 0
    ],
)
def test_an_answer_s_program_is_run(answer, right):
    assert programs.passes(PROBLEM, answer) == right


@pytest.mark.wide
def test_it_cannot_go_on_for_ever():
    assert not programs.comes_to_its_end("while True:\n    pass", 3.0)


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(1 + (1 << 30))",
        "open('mine', 'wb').write(bytes(2 << 20))",
        "open({elsewhere!r}, 'w')",
        "import os\nos.open({elsewhere!r}, os.O_CREAT | os.O_WRONLY)",
        "import os\nos.remove({there!r})",
        "import os\nos.system('true')",
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import socket\nsocket.create_connection(('127.0.0.1', {port}))",
        "import os\nos.environ['PLANTED']",
    ],
)
def test_what_it_may_not(program, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", "secret")
    there = tmp_path / "there"
    there.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {
            "elsewhere": str(tmp_path / "new"),
            "there": str(there),
            "port": server.getsockname()[1],
        }
        assert not programs.comes_to_its_end(program.format(**names))
    assert [file.name for file in tmp_path.iterdir()] == ["there"]


def test_what_it_may():
    programs.check_limits()
    allowed = "import os, re, random\nopen('mine', 'w').write('x')\nassert open('mine').read() == 'x'"
    assert programs.comes_to_its_end(allowed)


def test_where_no_program_runs_within_limits_that_is_said(monkeypatch):
    monkeypatch.setattr(programs, "comes_to_its_end", lambda program: False)
    with pytest.raises(UserError, match="cannot run programs within limits"):
        programs.check_limits()
