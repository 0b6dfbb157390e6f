"""What child processes of the tests are started with."""

import json
import os
import socket
import subprocess
import sys
from typing import Any


def environment(xla_flags: str = "") -> dict[str, str]:
    """This process's, with the settings of `conftest.py` and all that can be imported here.

    Args:
      xla_flags: go after those that are set.
    """
    return os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def run(
    *command: object, xla_flags: str = "", stdin: str | None = None, **variables: str
) -> subprocess.CompletedProcess:
    """A command in a separate process."""
    return subprocess.run(
        [*map(str, command)],
        env=environment(xla_flags) | variables,
        capture_output=True,
        text=True,
        timeout=900,
        input=stdin,
    )


def output_of(*code: object, command: tuple = (sys.executable, "-c"), **more: str) -> str:
    """Standard output of Python code with arguments, or of a command, which must exit with 0."""
    done = run(*command, *code, **more)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def printed_by(*code: object, **more: str) -> Any:
    """The JSON value in the last line that `output_of` gives."""
    return json.loads(output_of(*code, **more).splitlines()[-1])


def devices(n: int) -> str:
    """XLA's flags for n simulated CPU devices, which may wait long for each other on a busy machine.

    As it is, XLA ends the process where a thread comes 40 seconds late.
    """
    late = "--xla_cpu_collective_call_terminate_timeout_seconds=900"
    later = "--xla_cpu_collective_timeout_seconds=900"
    return f"--xla_force_host_platform_device_count={n} {late} {later}"


def two(*args: str) -> list[subprocess.Popen]:
    """The same command in two processes that find each other, with four devices each."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    flags = [f"--coordinator_address=localhost:{port}", "--num_processes=2"]
    return [
        subprocess.Popen(
            [*args, *flags, f"--process_id={i}"],
            env=environment(devices(4)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]


def ended(processes: list[subprocess.Popen]) -> list[str]:
    """What each wrote to stderr, once they have ended; what they printed is dropped."""
    return [process.communicate(timeout=900)[1] for process in processes]
