"""Chat templates rendered in a process that is bounded in time, memory and output."""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from medusa_jax.console import call_if_longer
from medusa_jax.errors import UserError

PROGRAM = Path(__file__).with_name("template_process.py")


class Renderer:
    """The process, started by the first template and again after one that it did not outlive.

    Args:
      seconds: of CPU time, for one conversation.
      most_bytes: of memory, for the whole process.
      most_characters: of a rendered conversation.
      patience: seconds by the clock, for one conversation.
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
        if hasattr(os, "register_at_fork"):  # neither lock nor pipes are shared
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, source: str, **fields: Any) -> dict[str, Any]:
        """Render a template with these fields.

        Returns: {"text", "spans": [start, end) of its generation blocks}, or one of {"broken"}, the
          template is none, and {"refused"}, it raised an error; each with a sentence.

        Raises:
          UserError: the template did not end within the limits.
        """
        request = json.dumps({"source": source, "fields": fields}).encode() + b"\n"
        with self._lock:
            line = self._exchange(request)
        seconds, most_bytes, _ = self._limits
        ended = f"it takes more than {seconds:g} s or {most_bytes >> 20} MiB"
        answer: dict[str, Any] = json.loads(line) if line else {"limit": ended}
        if why := answer.get("limit"):
            raise UserError(f"the chat template is stopped: {why}")
        return answer

    def _exchange(self, request: bytes) -> bytes:
        """The answer to a request, b"" where the process ended over it."""
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
        except (
            BaseException
        ):  # an answer that nobody read would be taken for the next one's
            self._end()
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
            with suppress(OSError):  # what could not be written
                pipe.close()
