"""Continuous batching, one turn at a time.

A turn reads one piece of a prompt, or several short prompts, and dispatches one chunk of steps; then the
host reads the previous chunk's results. Running rows therefore stall for at most one piece. A chunk takes
about `PACE` seconds (`ladder.py`), and ends when a row ends, so that the next request gets the row. The host
decodes and delivers text while the device works: first tokens and ends at once, other parts once per `PACE`.

A turn uses only programs that are ready (`programs.py`). A request whose programs are not ready waits and
lets later ones go first. If a text outgrows the slots for which programs are ready, its row is parked
until larger programs exist, since no row can step next to a full one.

The parts: `jobs.py` (where each request is), `room.py` (the batch's size), `prompts.py` (reading prompts),
`preemption.py` (texts that outgrow the slots), `chunks.py` (steps and their results), `ladder.py` (sizes of trees).
"""

from medusa_jax.serving.batch import Batch
from medusa_jax.serving.chunks import Chunks
from medusa_jax.serving.guide_threads import GuideThreads
from medusa_jax.serving.job import Job
from medusa_jax.serving.jobs import Jobs, tell
from medusa_jax.serving.preemption import Preemption
from medusa_jax.serving.programs import Compiler
from medusa_jax.serving.prompts import PromptReader
from medusa_jax.serving.request import Stopped
from medusa_jax.serving.room import Room


class Scheduler:
    """Requests in, deltas out. It has no thread: the caller calls `step`.

    Args:
      compiler: tells which programs are compiled.
      chunk_steps: most steps of a chunk.
      threads: run the host's work on constraints.
    """

    def __init__(
        self, batch: Batch, compiler: Compiler, chunk_steps: int, threads: GuideThreads
    ) -> None:
        self._batch, self._jobs = batch, Jobs(batch)
        self._room = Room(batch, self._jobs, compiler)
        self._chunks = Chunks(batch, self._jobs, self._room, chunk_steps, threads)
        self._reader = PromptReader(batch, self._jobs, self._room, self._chunks)
        self._preemption = Preemption(batch, self._jobs, self._room, self._chunks)

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
        self._jobs.turn += 1
        self._jobs.drop_cancelled()
        self._reader.drop_cancelled()
        any_returned = self._preemption.return_rows()
        any_read = self._reader.read()
        self._preemption.make_room(self._reader.row_prompt)
        any_run = self._chunks.run()
        # Read the chunk just dispatched in the next turn, after that has dispatched another one, unless
        # requests wait for a row.
        n_pending = len(self._chunks.pending)
        n_left = 1 if any_run and not self._jobs.waiting else 0
        while len(self._chunks.pending) > n_left:
            self._chunks.deliver_oldest()
        return bool(any_returned or any_read or any_run or n_pending)

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
