"""HumanEval's pass@1: is the program that the model wrote right? It is run to find out.

A process of its own runs it, with limits of time, memory and file size, in an empty directory, without
the environment's variables, and under an audit hook that refuses the network, other processes and
writing elsewhere. That stops accidents, not malice: code that wants to get out of plain Python can.
Whoever is in doubt runs this in a container or a virtual machine.
"""

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from typing import Any

from medusa_jax.errors import UserError

# Of computing; on the clock three times as many, since other work on the machine wrongs no program.
SECONDS = 10
BYTES, FILE_BYTES = 1 << 30, 1 << 20
# Exit status of a program that came to its end; 0 would be that of sys.exit() as well.
DONE = 87
# Where a completion ends, if not at its end: what follows is no longer the function (Chen et al. 2021).
ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\n```")
FENCED = re.compile(r"```(?:[Pp]ython)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)

GUARDED = f"""\
import os, resource, sys
for limit, most in (
    (resource.RLIMIT_AS, {BYTES}), (resource.RLIMIT_FSIZE, {FILE_BYTES}),
    (resource.RLIMIT_CPU, {SECONDS}), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (most, most))
refused = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.kill",
    "os.chmod", "os.chown", "os.link", "os.symlink", "os.remove", "os.rename", "os.rmdir", "os.mkdir",
    "os.truncate", "shutil.", "ctypes.", "pty.",
)
here = os.path.join(os.path.realpath(os.getcwd()), "")
def guard(event, args):
    if event.startswith(refused):
        raise PermissionError(event + " is refused")
    if event == "open" and not isinstance(args[0], int):
        writes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and not os.path.realpath(os.fsdecode(args[0])).startswith(here):
            raise PermissionError("writing elsewhere is refused")
with open("program.py", encoding="utf-8") as file:
    program = compile(file.read(), "program.py", "exec")
leave = os._exit
sys.addaudithook(guard)
exec(program, {{"__name__": "__main__"}})
leave({DONE})
"""


def program_of(question: dict[str, Any], answer: str) -> str:
    """The program that an answer makes of a HumanEval problem, with its tests.

    A block of code that defines the function takes its place, behind what the problem has in front
    of it; any other answer goes on where the problem ends, as far as the function does.
    """
    prompt, name = question["prompt"], question["entry_point"]
    blocks = FENCED.findall(answer)
    whole = [block for block in blocks if f"def {name}(" in block]
    if whole:
        program = prompt.partition(f"def {name}(")[0] + whole[0]
    else:
        body = blocks[0] if blocks else answer
        ends = [at for at in map(body.find, ENDS) if at >= 0]
        program = prompt + body[: min(ends, default=len(body))]
    return f"{program}\n\n{question['test']}\n\ncheck({name})\n"


@cache
def comes_to_its_end(program: str, seconds: float = 3 * SECONDS) -> bool:
    """Whether a program ends by itself, without an exception and in time; it is run."""
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "program.py"), "w", encoding="utf-8") as file:
            file.write(program)
        try:
            process = subprocess.run(
                [sys.executable, "-I", "-B", "-X", "utf8", "-c", GUARDED],
                cwd=directory,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return False
    return process.returncode == DONE


def check_limits() -> None:
    """Programs can be run within their limits.

    Raises:
      UserError: not on this system.
    """
    if os.name != "posix" or not comes_to_its_end("pass"):
        raise UserError("--execute: this system cannot run programs within limits")


def passes(question: dict[str, Any], answer: str) -> float:
    """1.0 if the answer passes the problem's tests, else 0.0."""
    return float(comes_to_its_end(program_of(question, answer)))
