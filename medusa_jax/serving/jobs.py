"""The requests of a server by where they are: waiting, in a row of the batch, or parked."""

import contextlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from medusa_jax.serving.batch import Batch, Reading
from medusa_jax.serving.job import Job
from medusa_jax.serving.programs import NotCompiled
from medusa_jax.serving.request import Stopped


@dataclass
class Row:
    """The host's view of one row of the batch, which methods of `Jobs` alone change.

    Attributes:
      cached: tokens of the text in its cache, also after its request has ended.
      drafted: number of these that the drafter has read; plain decoding does not advance it.
      job: the request that occupies the row.
      used: its place in the order in which rows were left; the least was left longest ago.
    """

    cached: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    drafted: int = 0
    job: Job | None = None
    used: int = 0

    def keep(self, text: np.ndarray, drafted: int) -> None:
        """Record the text in the cache, and how many of its tokens the drafter has read."""
        self.cached, self.drafted = text, min(drafted, len(text))


class Jobs:
    """Where each request is.

    Attributes:
      waiting: without a row, in the order of their arrival.
      parked: taken out of the batch, since their texts outgrow its slots.
      rows: of the largest batch.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.waiting: deque[Job] = deque()
        self.parked: dict[Job, Reading] = {}
        self.rows = [Row() for _ in range(max(batch.engines.trees))]
        self._left = 0  # texts that were left in rows

    @property
    def running(self) -> dict[int, Job]:
        """By row, the requests whose prompt has been read."""
        rows = enumerate(self.rows)
        return {i: r.job for i, r in rows if r.job and r.job.row is not None}

    @property
    def on_device(self) -> list[Job]:
        """Requests that are lost if the rows' state is lost."""
        return [*(row.job for row in self.rows if row.job), *self.parked]

    def free_row(self, lengths: list[int]) -> int:
        """Return the free row whose text is the smallest loss.

        Args:
          lengths: for each row, the length of its longest common prefix with the new text.
        """
        rows = self.rows[: self._batch.rows]

        def loss(i: int) -> tuple[bool, int, int]:
            """First rows whose whole text the new one continues, then the least recently used."""
            if lengths[i] == len(rows[i].cached):
                return False, -lengths[i], 0
            return True, 0, rows[i].used

        return min((i for i, row in enumerate(rows) if not row.job), key=loss)

    def reserve(self, job: Job | None, at: int) -> None:
        """Give a row to a request whose prompt is read from now on, or to none if it is not read on."""
        self.rows[at].job = job

    def seat(self, job: Job, at: int) -> None:
        """Record that a row of the batch has a request's text, which was read or parked."""
        row = self.rows[at]
        row.job, job.row = job, at
        row.keep(*job.cached(self._batch.slots))
        self.parked.pop(job, None)

    def leave(self, at: int, text: np.ndarray, drafted: int) -> None:
        """Record the text that a row without a request has for reuse."""
        row = self.rows[at]
        row.keep(text, drafted)
        self._left += 1
        row.job, row.used = None, self._left

    def crop(self, n_rows: int, slots: int) -> None:
        """Shorten the rows' texts to what a batch of this size keeps."""
        for at, row in enumerate(self.rows):
            n = slots - self._batch.engines.widest if at < n_rows else 0
            row.keep(row.cached[:n], row.drafted)

    def park(self, job: Job, reading: Reading) -> None:
        """Keep a request outside the batch; its row is free."""
        self.parked[job] = reading
        self.free(job, self._batch.slots)

    def free(self, job: Job, slots: int) -> None:
        """Take a request's row away; the row keeps its text for reuse.

        Args:
          slots: the cache's slots at the request's last step. Later steps keep writing after this row's
            text, or to the last slots if it is full.
        """
        assert job.row is not None
        self.leave(job.row, *job.cached(slots - self._batch.engines.widest))
        job.row = None

    def refuse(self, jobs: Iterable[Job], error: NotCompiled) -> None:
        """Fail requests whose programs cannot be compiled."""
        for job in jobs:
            if job.row is not None:
                self.free(job, self._batch.slots)
            if job in self.waiting:
                self.waiting.remove(job)
            self.parked.pop(job, None)
            tell([job], Stopped(f"no program for this request: {error}"))

    def drop_cancelled(self) -> None:
        """Drop requests that their clients have cancelled, except one whose prompt is being read."""
        self.waiting = deque(job for job in self.waiting if not job.handle.cancelled)
        for job in [job for job in self.parked if job.handle.cancelled]:
            del self.parked[job]
        for job in self.running.values():
            if job.handle.cancelled:
                self.free(job, self._batch.slots)

    def forget_rows(self) -> None:
        """Forget every row's request and text, and the parked ones."""
        self.parked.clear()
        self.rows[:] = [Row() for _ in self.rows]


def tell(jobs: Iterable[Job], error: Stopped) -> None:
    """Deliver an error to these requests; a failed delivery does not affect the others."""
    for job in jobs:
        with contextlib.suppress(Exception):
            job.deliver(error)
