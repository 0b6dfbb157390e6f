"""TensorBoard events of a run.

Written by the caller's thread: tensorboardX's `SummaryWriter` has a thread, which ends where the
disk is full, and then holds up for ever whoever adds more than ten events.
"""

import os
import time
from collections.abc import Mapping


class Board:
    """One file of events; viewers drop events of later steps than `start` from earlier files."""

    def __init__(self, workdir: str, start: int):
        """Opens the file.

        Raises:
          ImportError: tensorboardX is not installed.
        """
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self.event, self.scalar = Event, summary.scalar
        directory = os.path.join(workdir, "tensorboard")
        os.makedirs(directory, exist_ok=True)
        self.writer = EventsWriter(os.path.join(directory, "events"))
        again = SessionLog(status=SessionLog.START)
        self.writer.write_event(Event(step=start + 1, session_log=again))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """One event with all the scalars; it may wait in a buffer until `flush`."""
        parts = self.event().summary
        for tag, x in scalars.items():
            parts.MergeFrom(self.scalar(tag, x))
        self.writer.write_event(self.event(step=step, wall_time=time.time(), summary=parts))

    def flush(self) -> None:
        """Write what waits in the buffer."""
        self.writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self.writer.close()
