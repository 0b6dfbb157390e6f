"""Continuous batching, one turn at a time.

A turn reads one piece of a prompt, or several short prompts, and dispatches one chunk of steps; then the
host reads the previous chunk's results. Running rows therefore stall for at most one piece. A chunk takes
about `PACE` seconds (`ladder.py`), and ends when a row ends, so that the next request gets the row. The host
decodes and delivers text while the device works: first tokens and ends at once, other parts once per `PACE`.

A turn uses only programs that are ready (`programs.py`). A request whose programs are not ready waits and
lets later ones go first. If a text outgrows the slots for which programs are ready, its row is parked
until larger programs exist, since no row can step next to a full one.

The parts: `jobs.py` (where each request is), `batch_size.py`, `prompt_reader.py`, `chunks.py` (steps and their
results), `ladder.py` (sizes of trees).
"""

from collections.abc import Mapping

from medusa_jax.serving.batch import Batch
from medusa_jax.serving.batch_size import BatchSize
from medusa_jax.serving.chunks import Chunks
from medusa_jax.serving.guide_threads import GuideThreads
from medusa_jax.serving.job import Job
from medusa_jax.serving.jobs import Jobs, tell
from medusa_jax.serving.programs import Compiler, NotCompiled
from medusa_jax.serving.prompt_reader import PromptReader
from medusa_jax.serving.request import Stopped


class Scheduler:
    """Requests in, deltas out. It has no thread: the caller calls `step`.

    Args:
      compiler: tells which programs are compiled.
      threads: run the host's work on constraints.
    """

    def __init__(self, batch: Batch, compiler: Compiler, threads: GuideThreads) -> None:
        self._batch, self._jobs = batch, Jobs(batch)
        self._size = BatchSize(batch, self._jobs, compiler)
        self._chunks = Chunks(batch, self._jobs, self._size, threads)
        self._reader = PromptReader(batch, self._jobs, self._size, self._chunks)

    @property
    def slots(self) -> int:
        """Requests that can be answered at a time."""
        return len(self._jobs.rows)

    @property
    def busy(self) -> int:
        """Rows that have a request."""
        return sum(row.job is not None for row in self._jobs.rows)

    @property
    def waiting(self) -> int:
        """Requests without a row, parked ones included."""
        return len(self._jobs.waiting) + len(self._jobs.parked)

    @property
    def chunks(self) -> int:
        """Number of finished chunks."""
        return self._chunks.finished

    def slot_sizes(self, most_tokens: int) -> list[int]:
        """Return the cache sizes for texts of up to this many tokens, ascending."""
        lengths = range(1, most_tokens + 1)
        return sorted({self._batch.slots_for(length) for length in lengths})

    def add(self, job: Job) -> None:
        self._jobs.waiting.append(job)

    def step(self) -> bool:
        """Take one turn; returns whether work is left for another.

        If not, `busy` and `waiting` show whether requests wait for programs.
        """
        self._jobs.drop_cancelled()
        self._reader.drop_cancelled()
        any_returned = self._return_rows()
        any_read = self._reader.read()
        self._make_room()
        any_run = self._chunks.run()
        # Read the chunk just dispatched in the next turn, after that has dispatched another one, unless
        # requests wait for a row.
        n_pending = len(self._chunks.pending)
        n_left = 1 if any_run and not self._jobs.waiting else 0
        while len(self._chunks.pending) > n_left:
            self._chunks.deliver_oldest()
        return bool(any_returned or any_read or any_run or n_pending)

    def _return_rows(self) -> bool:
        """Put parked rows back that fit now; returns whether any did."""
        jobs, n_parked = self._jobs, len(self._jobs.parked)
        for job, reading in list(jobs.parked.items()):
            if self._size.admit_or_refuse(job, job.length):
                self._size.resize(*self._size.with_text(job.length))
                at = jobs.free_row([0] * self._batch.rows)
                self._chunks.insert(job, reading, at)
        return len(jobs.parked) < n_parked

    def _make_room(self) -> None:
        """Grow to the slots that the longest text needs; shrink after a while."""
        batch, jobs, row_prompt = self._batch, self._jobs, self._reader.row_prompt
        full_jobs = {
            at: job
            for at, job in jobs.running.items()
            if batch.slots_for(job.length) > batch.slots
        }
        if full_jobs:
            self._grow(full_jobs)
        lengths = {at: job.length for at, job in jobs.running.items()}
        if row_prompt:
            lengths[row_prompt.at] = len(row_prompt.job.prompt)
        if lengths:
            self._size.shrink(lengths, self._chunks.unseen_tokens)

    def _grow(self, jobs: Mapping[int, Job]) -> None:
        """Grow the batch for these rows, or park them until it can."""
        batch = self._batch
        slots = max(batch.slots_for(job.length) for job in jobs.values())
        groups = {job.group for job in jobs.values()}
        try:
            compiled = [self._size.ready_or_queue(g, batch.rows, slots) for g in groups]
        except NotCompiled as error:
            self._jobs.refuse(jobs.values(), error)
            return
        if all(compiled):
            self._size.resize(batch.rows, slots)
        else:
            for at, job in jobs.items():
                self._jobs.park(job, batch.take(at, job.group))

    def fail(self, error: Stopped) -> None:
        """Tell every request that it gets no answer."""
        jobs = [*self._jobs.on_device, *self._jobs.waiting]
        self._jobs.waiting.clear()
        self._forget()
        tell(jobs, error)

    def restart(self, error: Stopped) -> None:
        """Continue with the queue after an error that destroyed the rows' state.

        Raises:
          Exception: the device cannot hold new rows either.
        """
        jobs = self._jobs.on_device
        self._forget()
        tell(jobs, error)
        self._batch.restart()

    def _forget(self) -> None:
        """Forget the state of all rows."""
        self._jobs.forget_rows()
        self._reader.row_prompt = None
        self._chunks.pending.clear()
