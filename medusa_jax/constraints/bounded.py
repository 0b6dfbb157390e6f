"""A child process with limits on CPU time and memory, for work that nothing within a process bounds."""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from medusa_jax.console import call_if_longer
from medusa_jax.whole_files import Json

CHILD = Path(__file__).with_name("bounded_child.py")


class BoundedProcess:
    """A process that answers requests, started on first use and restarted after one ended it.

    Args:
      program: Python file that defines `make_answer(*settings)`, which returns a function from one request
        to its answer, both JSON objects.
      settings: JSON values for `make_answer`.
      seconds: limit of CPU time per request.
      most_bytes: memory limit of the process.
      patience: limit of wall-clock seconds per request.
    """

    def __init__(
        self,
        program: Path,
        *settings: Any,
        seconds: float,
        most_bytes: int,
        patience: float = 60.0,
    ) -> None:
        self._settings = str(program), settings, seconds, most_bytes
        self.exceeded = f"it takes more than {seconds:g} s or {most_bytes >> 20} MiB"
        self._patience = patience
        self._forget()
        if hasattr(os, "register_at_fork"):  # a child must not share the lock and pipes
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, **request: object) -> Json:
        """The answer to a request; {"limit": reason} if it exceeded a limit. One at a time."""
        data = json.dumps(request).encode() + b"\n"
        with self._lock:
            line = self._exchange(data)
        answer: Json = json.loads(line) if line else {"limit": self.exceeded}
        return answer

    def _exchange(self, request: bytes) -> bytes:
        """The answer to a request; b"" if the process ended instead."""
        process = self._process
        if process is None or process.poll() is not None:
            self._process = process = self._start()
        assert process.stdin and process.stdout
        try:
            with call_if_longer(self._patience, process.kill):
                process.stdin.write(request)
                process.stdin.flush()
                line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        except BaseException:
            self._end()  # an unread answer would be taken for that of the next request
            raise
        if not line.endswith(b"\n"):
            self._end()
            return b""
        return line

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [path for path in sys.path if path]
        settings = json.dumps((paths, *self._settings))
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD), settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe
            with suppress(OSError):  # unwritten data
                pipe.close()
