"""The size of the batch: the rows and slots that requests need, as far as programs are ready."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from medusa_jax.serving.batch import Batch
from medusa_jax.serving.job import BASE, Group, Job
from medusa_jax.serving.programs import Compiler, Programs

# The batch shrinks after this many turns that needed fewer rows or slots.
PATIENCE = 64


@dataclass
class Row:
    """The host's view of one row of the batch.

    Attributes:
      cached: tokens of the text in its cache, also after its request has ended.
      drafted: number of these that the drafter has read; plain decoding does not advance it.
      job: the request that occupies the row.
      used: the turn in which the row last changed hands.
    """

    cached: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    drafted: int = 0
    job: Job | None = None
    used: int = 0

    def keep(self, text: np.ndarray, drafted: int) -> None:
        """Record the text in the cache, and how many of its tokens the drafter has read."""
        self.cached, self.drafted = text, min(drafted, len(text))


class Room:
    """Decides the size of a batch.

    Args:
      rows: the rows of the largest batch.
      sizes: allowed numbers of rows, ascending.
      programs: tells which programs are compiled.
    """

    def __init__(
        self, batch: Batch, rows: list[Row], sizes: list[int], programs: Compiler
    ) -> None:
        self.batch, self.rows, self.sizes, self.programs = batch, rows, sizes, programs
        self._roomy = 0  # consecutive turns that needed less

    @property
    def running(self) -> dict[int, Job]:
        """By row, the requests whose prompt has been read."""
        rows = enumerate(self.rows)
        return {i: r.job for i, r in rows if r.job and r.job.row is not None}

    def size_with(self, length: int) -> tuple[int, int]:
        """Return the size for one more text of this length; 0 rows if all are occupied."""
        batch = self.batch
        n_rows = batch.rows
        if all(row.job for row in self.rows[:n_rows]):
            n_rows = next((n for n in self.sizes if n > n_rows), 0)
        return n_rows, max(batch.slots, batch.slots_for(length))

    def ready(self, group: Group, n_rows: int, slots: int) -> bool:
        """Return whether programs for this group and for `BASE` requests are ready at this size.

        The cache grows only once `BASE` requests have programs at the new number of slots for every number
        of rows that they have now. Otherwise the next request would wait.

        Raises:
          NotCompiled: a program cannot be compiled.
        """
        batch, wanted = self.batch, {Programs(group, n_rows, slots)}
        if (n_rows, slots) != (batch.rows, batch.slots):
            wanted.add(Programs(BASE, n_rows, slots))
        if slots > batch.slots:
            now = [n for n in self.sizes if self.known(BASE, n, batch.slots)]
            wanted |= {Programs(BASE, n, slots) for n in now}
        ready = [self.programs.ready(each) for each in sorted(wanted)]  # queues all
        return all(ready)

    def known(self, group: Group, n_rows: int, slots: int) -> bool:
        """Return whether programs are ready, without queueing them."""
        return self.programs.known(Programs(group, n_rows, slots))

    def fit(self, n_rows: int, slots: int) -> None:
        """Change the size of the batch; with fewer slots, rows keep less of their texts."""
        if slots < self.batch.slots:
            for row in self.rows:
                row.keep(row.cached[: slots - self.batch.widest], row.drafted)
        for row in self.rows[n_rows:]:
            row.keep(row.cached[:0], 0)
        self.batch.fit(n_rows, slots)

    def shrink(self, lengths: Mapping[int, int], unseen: int) -> None:
        """Shrink to the rows and slots in use, after `PATIENCE` turns that needed less.

        Args:
          lengths: text length by occupied row, as far as the host knows.
          unseen: tokens by which each text may have grown since.
        """
        batch = self.batch
        slots = min(batch.slots, batch.slots_for(max(lengths.values()) + unseen))
        n_rows = min(batch.rows, next(n for n in self.sizes if n > max(lengths)))
        fewer = n_rows < batch.rows or slots < batch.slots
        self._roomy = self._roomy + 1 if fewer else 0
        groups = {BASE, *(row.job.group for row in self.rows if row.job)}
        if self._roomy >= PATIENCE and all(self.known(g, n_rows, slots) for g in groups):
            self.fit(n_rows, slots)
            self._roomy = 0

    def empty(self) -> None:
        """Forget every row's request and text."""
        self.rows[:] = [Row() for _ in self.rows]
        self._roomy = 0
