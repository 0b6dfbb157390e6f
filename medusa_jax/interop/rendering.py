"""Render chat templates in a process with limits on time, memory and output."""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from medusa_jax.console import call_if_longer
from medusa_jax.errors import UserError
from medusa_jax.whole_files import Json

PROGRAM = Path(__file__).with_name("template_process.py")


class Renderer:
    """The child process, started on first use and restarted after a template ended it.

    Args:
      seconds: limit of CPU time per conversation.
      most_bytes: memory limit of the process.
      most_characters: limit of a rendered conversation.
      patience: limit of wall-clock seconds per conversation.
    """

    def __init__(
        self,
        seconds: float = 3.0,
        most_bytes: int = 1 << 30,
        most_characters: int = 1 << 25,
        patience: float = 60.0,
    ) -> None:
        self._limits = (seconds, most_bytes, most_characters)
        self._patience = patience
        self._forget()
        if hasattr(os, "register_at_fork"):  # a child must not share the lock and pipes
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, source: str, **fields: object) -> Json:
        """Render a template with these fields.

        Returns: {"text", "spans": [start, end) of its generation blocks}, or a message: {"broken"} for an invalid
          template, {"refused"} if it raised an error.

        Raises:
          UserError: the template exceeded the limits.
        """
        request = json.dumps({"source": source, "fields": fields}).encode() + b"\n"
        with self._lock:
            line = self._exchange(request)
        seconds, most_bytes, _ = self._limits
        exceeded = f"it takes more than {seconds:g} s or {most_bytes >> 20} MiB"
        answer: Json = json.loads(line) if line else {"limit": exceeded}
        if why := answer.get("limit"):
            raise UserError(f"the chat template is stopped: {why}")
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
        settings = json.dumps((paths, *self._limits))
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM), settings],
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
