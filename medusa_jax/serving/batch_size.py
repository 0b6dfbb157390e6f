"""Choose the numbers of rows and slots of the batch, among those whose programs are compiled."""

from collections.abc import Mapping

from medusa_jax.serving.batch import Batch
from medusa_jax.serving.job import BASE, Group, Job
from medusa_jax.serving.jobs import Jobs
from medusa_jax.serving.programs import Compiler, NotCompiled, Programs

# The batch shrinks after this many turns that needed fewer rows or slots.
ROOMY_TURNS = 64


class BatchSize:
    """Decides the size of a batch.

    Args:
      jobs: the requests, by where they are.
      compiler: tells which programs are compiled.
    """

    def __init__(self, batch: Batch, jobs: Jobs, compiler: Compiler) -> None:
        self.batch, self.jobs, self.compiler = batch, jobs, compiler
        self.sizes = sorted(batch.engines.trees)  # numbers of rows
        self._roomy = 0  # consecutive turns that needed less

    def with_text(self, length: int) -> tuple[int, int]:
        """Return the size for one more text of this length; 0 rows if all are occupied."""
        batch = self.batch
        n_rows = batch.rows
        if all(row.job for row in self.jobs.rows[:n_rows]):
            n_rows = next((n for n in self.sizes if n > n_rows), 0)
        return n_rows, max(batch.slots, batch.slots_for(length))

    def ready_or_queue(self, group: Group, n_rows: int, slots: int) -> bool:
        """Return whether programs for this group and `BASE` are ready at this size; if not, queue them.

        The cache grows only once `BASE` requests have programs at the new number of slots for every number
        of rows that they have now. Otherwise the next request would wait.

        Raises:
          NotCompiled: a program cannot be compiled.
        """
        batch, needed = self.batch, {Programs(group, n_rows, slots)}
        if (n_rows, slots) != (batch.rows, batch.slots):
            needed.add(Programs(BASE, n_rows, slots))
        if slots > batch.slots:
            sizes = [n for n in self.sizes if self.is_ready(BASE, n, batch.slots)]
            needed |= {Programs(BASE, n, slots) for n in sizes}
        base_first = sorted(needed, key=lambda p: (p.group != BASE, p))
        compiled = [self.compiler.ready_or_queue(p) for p in base_first]  # queues all
        return all(compiled)

    def admit_or_refuse(self, job: Job, length: int) -> bool:
        """Return whether a request with a text of this length can have a row now.

        A request for which no row can ever have programs is refused.
        """
        n_rows, slots = self.with_text(length)
        try:
            return bool(n_rows) and self.ready_or_queue(job.group, n_rows, slots)
        except NotCompiled as error:
            # If only a larger batch fails to compile, the request can wait for an existing row.
            if n_rows == self.batch.rows or slots > self.batch.slots:
                self.jobs.refuse([job], error)
            return False

    def is_ready(self, group: Group, n_rows: int, slots: int) -> bool:
        """Return whether a group's programs are ready at this size."""
        return self.compiler.is_ready(Programs(group, n_rows, slots))

    def resize(self, n_rows: int, slots: int) -> None:
        """Change the size of the batch; with fewer slots, rows keep less of their texts."""
        self.jobs.crop(n_rows, slots)
        self.batch.resize(n_rows, slots)

    def shrink(self, lengths: Mapping[int, int], margin: int) -> None:
        """Shrink to the rows and slots in use, after `ROOMY_TURNS` turns that needed less.

        Args:
          lengths: text length by occupied row, as far as the host knows.
          margin: tokens by which each text may have grown since.
        """
        batch = self.batch
        slots = min(batch.slots, batch.slots_for(max(lengths.values()) + margin))
        n_rows = min(batch.rows, next(n for n in self.sizes if n > max(lengths)))
        fewer = n_rows < batch.rows or slots < batch.slots
        self._roomy = self._roomy + 1 if fewer else 0
        groups = {BASE, *(row.job.group for row in self.jobs.rows if row.job)}
        if self._roomy >= ROOMY_TURNS and all(
            self.is_ready(g, n_rows, slots) for g in groups
        ):
            self.resize(n_rows, slots)
            self._roomy = 0
