"""Reading prompts: a row for the next request, and its prompt piece by piece."""

from typing import NamedTuple

import numpy as np

from medusa_jax.api.dialogue import shared_start
from medusa_jax.errors import first_line
from medusa_jax.serving.batch import Batch, Reading
from medusa_jax.serving.batch_size import BatchSize
from medusa_jax.serving.chunks import Chunks
from medusa_jax.serving.job import Job
from medusa_jax.serving.jobs import Jobs, tell
from medusa_jax.serving.request import Stopped


class RowPrompt(NamedTuple):
    """A request whose prompt is being read, and its row `at`."""

    job: Job
    reading: Reading
    at: int


class PromptReader:
    """Reads prompts into rows, one request after the other.

    Attributes:
      row_prompt: the request whose prompt is being read.
    """

    def __init__(self, batch: Batch, jobs: Jobs, size: BatchSize, chunks: Chunks) -> None:
        self._batch, self._jobs, self._size, self._chunks = batch, jobs, size, chunks
        self.row_prompt: RowPrompt | None = None

    def read(self) -> bool:
        """Read the next piece of a prompt, or as many short prompts; returns whether any was read."""
        tokens_left, any_read = self._batch.pieces[-1], False
        while True:
            self.row_prompt = self.row_prompt or self._begin()
            if self.row_prompt is None:
                return any_read
            job, reading, at = self.row_prompt
            if not self._size.is_ready(job.group, self._batch.rows, self._batch.slots):
                # The batch has grown for others meanwhile: read the prompt again later.
                self._jobs.waiting.appendleft(job)
                self._jobs.reserve(None, at)
                self.row_prompt = None
                return any_read
            tokens_left -= self._batch.next_tokens(reading)
            if tokens_left < 0:
                return True
            self._batch.read(reading)
            any_read = True
            if reading.done:
                self._chunks.insert(job, reading, at)
                self.row_prompt = None

    def drop_cancelled(self) -> None:
        """Stop reading a prompt whose client has cancelled; the row keeps what was read.

        An editor replaces its request with every keystroke, so long prompts would otherwise never be read.
        """
        if not (self.row_prompt and self.row_prompt.job.handle.cancelled):
            return
        job, reading, at = self.row_prompt
        batch, self.row_prompt = self._batch, None
        self._jobs.reserve(None, at)
        was_read = reading.position > job.reused
        if was_read and self._size.is_ready(job.group, batch.rows, batch.slots):
            batch.insert(reading, at)
            self._jobs.leave(at, reading.prompt[: reading.position], job.drafted)

    def _begin(self) -> RowPrompt | None:
        """Give a row to the first request of the queue that can have one."""
        if not self._size.with_text(0)[0]:
            return None
        jobs = list(self._jobs.waiting)  # `admit_or_refuse` removes some
        fitting = (job for job in jobs if self._size.admit_or_refuse(job, len(job.prompt)))
        job = next(fitting, None)
        if job is None:
            return None
        self._jobs.waiting.remove(job)
        try:
            return self._begin_in_row(job)
        except Exception as error:  # the job is in no queue, so report the error here
            tell([job], Stopped(f"a step failed: {first_line(error)}"))
            raise

    def _begin_in_row(self, job: Job) -> RowPrompt:
        """Give a request the row that loses least, and the start that its prompt shares with any row."""
        batch, prompt = self._batch, np.array(job.prompt, np.int32)
        self._size.resize(*self._size.with_text(len(prompt)))
        rows = self._jobs.rows[: batch.rows]
        # With drafts, the drafter must have read the shared start too.
        lengths = [row.drafted if job.request.drafts else len(row.cached) for row in rows]
        reused = [shared_start(row.cached[:n], prompt) for row, n in zip(rows, lengths)]
        at, source = self._jobs.free_row(reused), int(np.argmax(reused))
        reading = batch.begin(job.decode, source, reused[source], job.group)
        job.begin(reading.position, rows[source].drafted)
        self._jobs.reserve(job, at)
        return RowPrompt(job, reading, at)
