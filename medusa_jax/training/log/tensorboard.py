"""TensorBoard events of a run.

Written by the caller's thread: the thread of tensorboardX's `SummaryWriter` ends when the disk is full, and
then the eleventh event blocks its caller for ever.
"""

import os
import time
from collections.abc import Mapping


class Board:
    """One file of events; viewers drop events of later steps than `start` from earlier files."""

    def __init__(self, workdir: str, start: int):
        """Open the file.

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
        restart = SessionLog(status=SessionLog.START)
        self.writer.write_event(Event(step=start + 1, session_log=restart))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one event with all scalars; buffered until `flush`."""
        values = self.event().summary
        for tag, x in scalars.items():
            values.MergeFrom(self.scalar(tag, x))
        self.writer.write_event(
            self.event(step=step, wall_time=time.time(), summary=values)
        )

    def flush(self) -> None:
        """Write buffered events."""
        self.writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self.writer.close()
