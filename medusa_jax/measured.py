"""Notes about this machine that later processes read."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

import jax

from medusa_jax.cache_directories import cache_directory
from medusa_jax.devices.machine import processor
from medusa_jax.errors import UserError
from medusa_jax.whole_files import Json, write_json


def device_mark(*marks: object) -> str:
    """16 hex digits that stand for this machine, JAX and the other things that a measurement depends on.

    Args:
      marks: further dependencies, distinguished by their `repr`.
    """
    device = jax.devices()[0]
    machine = (jax.__version__, device.platform, device.device_kind, os.cpu_count())
    text = "\n".join(map(repr, (*machine, processor(), *marks)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class DeviceCache:
    """A note in the user's cache directory.

    Args:
      kind: the folder of such notes.
      marks: as for `device_mark`.
    """

    def __init__(self, kind: str, *marks: object) -> None:
        self.file = Path(cache_directory(kind)) / f"{device_mark(*marks)}.json"

    def read(self) -> Json:
        """The note; {} if there is none or it is damaged."""
        found = None
        with suppress(OSError, ValueError):
            found = json.loads(self.file.read_text())
        return found if isinstance(found, dict) else {}

    def write(self, note: Json) -> None:
        """Keep a note; if that fails, the measurement is made again next time."""
        with suppress(OSError, UserError):
            write_json(self.file, note, indent=None)
