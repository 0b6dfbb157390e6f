"""Render chat templates in a process with limits on time, memory and output."""

from pathlib import Path

from medusa_jax.errors import UserError
from medusa_jax.interop.bounded import BoundedProcess
from medusa_jax.whole_files import Json

PROGRAM = Path(__file__).with_name("template_process.py")


class Renderer:
    """Renders in a child process.

    Args:
      seconds: limit of CPU time per conversation.
      most_bytes: memory limit of the process.
      most_characters: limit of a rendered conversation.
    """

    def __init__(
        self,
        seconds: float = 3.0,
        most_bytes: int = 1 << 30,
        most_characters: int = 1 << 25,
    ) -> None:
        self.process = BoundedProcess(
            PROGRAM, most_characters, seconds=seconds, most_bytes=most_bytes
        )

    def __call__(self, source: str, /, **fields: object) -> Json:
        """Render a template with these fields.

        Returns: {"text", "spans": [start, end) of its generation blocks}, or a message: {"broken"} for an invalid
          template, {"refused"} if it raised an error.

        Raises:
          UserError: the template exceeded the limits.
        """
        answer = self.process(source=source, fields=fields)
        if why := answer.get("limit"):
            raise UserError(f"the chat template is stopped: {why}")
        return answer
