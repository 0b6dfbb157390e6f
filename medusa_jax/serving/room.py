"""How many rows and slots the batch has: as many as requests need and programs are ready for."""

from typing import Protocol

from medusa_jax.serving.batch import Batch
from medusa_jax.serving.job import BASE, Group, Job
from medusa_jax.serving.programs import Programs
from medusa_jax.serving.seats import Seat

# After this many turns that needed fewer rows or slots than there are, there are fewer.
PATIENCE = 64


class Known(Protocol):
    """Which programs are compiled."""

    def ready(self, programs: Programs) -> bool:
        """Whether these are; if not, a request waits for them.

        Raises:
          NotCompiled: they cannot be compiled.
        """

    def known(self, programs: Programs) -> bool:
        """Whether these are."""


class InPlace:
    """Without a compiler, programs are compiled where they are first needed."""

    def ready(self, programs: Programs) -> bool:
        """Always."""
        return True

    known = ready


class Room:
    """The size of a batch, and who sits there.

    Args:
      seats: of all rows that there may be.
      sizes: numbers of rows that the batch may have, rising.
    """

    def __init__(
        self, batch: Batch, seats: list[Seat], sizes: list[int], programs: Known
    ) -> None:
        self.batch, self.seats, self.sizes, self.programs = batch, seats, sizes, programs
        self._roomy = 0

    @property
    def seated(self) -> dict[int, Job]:
        """By row, the requests whose prompt has been read."""
        seats = enumerate(self.seats)
        return {i: s.job for i, s in seats if s.job and s.job.seat is not None}

    def size_with(self, length: int) -> tuple[int, int]:
        """Rows and slots with one more text of this length; no rows: all are taken."""
        batch = self.batch
        n_rows = batch.rows
        if all(seat.job for seat in self.seats[:n_rows]):
            n_rows = next((n for n in self.sizes if n > n_rows), 0)
        return n_rows, max(batch.slots, batch.slots_for(length))

    def ready(self, group: Group, n_rows: int, slots: int) -> bool:
        """Whether a request of this group can step at this size, and ordinary ones go on.

        A cache is only made larger where that is so for every number of rows which ordinary requests
        have programs for now: else the next one would wait.

        Raises:
          NotCompiled: something of it cannot be compiled.
        """
        batch, wanted = self.batch, {Programs(group, n_rows, slots)}
        if (n_rows, slots) != (batch.rows, batch.slots):
            wanted.add(Programs(BASE, n_rows, slots))
        if slots > batch.slots:
            now = [n for n in self.sizes if self.known(BASE, n, batch.slots)]
            wanted |= {Programs(BASE, n, slots) for n in now}
        ready = [
            self.programs.ready(each) for each in sorted(wanted)
        ]  # ask for all of them
        return all(ready)

    def known(self, group: Group, n_rows: int, slots: int) -> bool:
        """Whether programs are ready, without waiting for them."""
        return self.programs.known(Programs(group, n_rows, slots))

    def fit(self, n_rows: int, slots: int) -> None:
        """Another size of the batch; where it is smaller, rows keep less of their texts."""
        if slots < self.batch.slots:
            for seat in self.seats:
                seat.keep(seat.kept[: slots - self.batch.widest], seat.drafted)
        for seat in self.seats[n_rows:]:
            seat.keep(seat.kept[:0], 0)
        self.batch.fit(n_rows, slots)

    def shrink(self, rows: list[int], lengths: list[int], unseen: int) -> None:
        """In time as few rows and slots as are needed.

        Args:
          rows, lengths: the rows that are taken and how long their texts are, as the host knows them.
          unseen: tokens that each may have grown by since.
        """
        batch = self.batch
        slots = min(batch.slots, batch.slots_for(max(lengths) + unseen))
        n_rows = min(batch.rows, next(n for n in self.sizes if n > max(rows)))
        fewer = n_rows < batch.rows or slots < batch.slots
        self._roomy = self._roomy + 1 if fewer else 0
        groups = {BASE, *(seat.job.group for seat in self.seats if seat.job)}
        if self._roomy >= PATIENCE and all(self.known(g, n_rows, slots) for g in groups):
            self.fit(n_rows, slots)
            self._roomy = 0

    def restart(self) -> None:
        """Empty seats and new rows.

        Raises:
          Exception: the device does not hold them; it may be called again.
        """
        self.empty()
        self.batch.restart()

    def empty(self) -> None:
        """No request has a seat, and no row a text."""
        self.seats[:] = [Seat() for _ in self.seats]
        self._roomy = 0
