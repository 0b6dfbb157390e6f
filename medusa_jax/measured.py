"""What was measured once on a machine, kept in the user's cache directory."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax

from medusa_jax.console import cache_directory, processor
from medusa_jax.errors import UserError
from medusa_jax.whole_files import write_json


class Kept:
    """A note about this machine, JAX and what else a measurement depends on.

    Args:
      kind: the folder of such notes.
      marks: what else it depends on; anything whose `repr` tells it apart.
    """

    def __init__(self, kind: str, *marks: Any) -> None:
        device = jax.devices()[0]
        machine = (jax.__version__, device.platform, device.device_kind, os.cpu_count())
        text = "\n".join(map(repr, (*machine, processor(), *marks)))
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.file = Path(cache_directory(kind)) / f"{name}.json"

    def read(self) -> dict[str, Any]:
        """The note; {} where there is none that can be read."""
        try:
            found = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, note: dict[str, Any]) -> None:
        """Keep a note; where that cannot be, it is measured again next time."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, note, indent=None)
        except (OSError, UserError):
            pass
