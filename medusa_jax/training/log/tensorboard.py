"""TensorBoard events of a run.

Written by the caller's thread: the thread of tensorboardX's `SummaryWriter` ends when the disk is full, and
then the eleventh event blocks its caller for ever.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog


class Board:
    """One file of events; viewers drop events of later steps than `start` from earlier files."""

    def __init__(self, workdir: Path, start: int):
        directory = workdir / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        self.writer = EventsWriter(str(directory / "events"))
        restart = SessionLog(status=SessionLog.START)
        self.writer.write_event(Event(step=start + 1, session_log=restart))
        self.flush, self.close = self.writer.flush, self.writer.close

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one event with all scalars; buffered until `flush`."""
        values = Event().summary
        for tag, x in scalars.items():
            values.MergeFrom(summary.scalar(tag, x))
        self.writer.write_event(Event(step=step, wall_time=time.time(), summary=values))
