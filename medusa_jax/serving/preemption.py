"""Texts that outgrow the slots: the batch grows, or their rows wait outside it."""

from collections.abc import Mapping

from medusa_jax.serving.batch import Batch
from medusa_jax.serving.chunks import Chunks
from medusa_jax.serving.job import Job
from medusa_jax.serving.jobs import Jobs
from medusa_jax.serving.programs import NotCompiled
from medusa_jax.serving.prompts import RowPrompt
from medusa_jax.serving.room import Room


class Preemption:
    """Grows the batch for long texts, or takes their rows out until larger programs exist."""

    def __init__(self, batch: Batch, jobs: Jobs, room: Room, chunks: Chunks) -> None:
        self._batch, self._jobs, self._room, self._chunks = batch, jobs, room, chunks

    def make_room(self, row_prompt: RowPrompt | None) -> None:
        """Grow to the slots that the longest text needs; shrink after a while.

        Args:
          row_prompt: the request whose prompt is being read.
        """
        batch, jobs = self._batch, self._jobs
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
            self._room.shrink(lengths, self._chunks.unseen_tokens)

    def _grow(self, jobs: Mapping[int, Job]) -> None:
        """Grow the batch for these rows, or park them until it can."""
        batch = self._batch
        slots = max(batch.slots_for(job.length) for job in jobs.values())
        groups = {job.group for job in jobs.values()}
        try:
            compiled = [self._room.ready_or_queue(g, batch.rows, slots) for g in groups]
        except NotCompiled as error:
            self._jobs.refuse(jobs.values(), error)
            return
        if all(compiled):
            self._room.resize(batch.rows, slots)
        else:
            for at, job in jobs.items():
                self._jobs.park(job, batch.take(at, job.group))

    def return_rows(self) -> bool:
        """Put parked rows back that fit now; returns whether any did."""
        jobs, n_parked = self._jobs, len(self._jobs.parked)
        for job, reading in list(jobs.parked.items()):
            if self._room.admit_or_refuse(job, job.length):
                self._room.resize(*self._room.size_for(job.length))
                at = jobs.free_row([0] * self._batch.rows)
                self._chunks.insert(job, reading, at)
        return len(jobs.parked) < n_parked
