"""Chunks of steps: which group of rows steps next, for how long, and what its results are."""

import time
from collections import deque
from dataclasses import dataclass, replace

import jax
import numpy as np

from medusa_jax.api.results import NO_SCORES
from medusa_jax.decoding.state import Progress
from medusa_jax.decoding.stopping import PAUSED, RUNNING, STOPPED
from medusa_jax.serving.batch import FEW_STEPS, Batch, Reading
from medusa_jax.serving.batch_size import BatchSize
from medusa_jax.serving.guide_threads import GuideThreads
from medusa_jax.serving.job import Group, Job
from medusa_jax.serving.jobs import Jobs, tell
from medusa_jax.serving.ladder import PACE, Ladder
from medusa_jax.serving.programs import NotCompiled, Programs
from medusa_jax.serving.request import NoScores, Stopped, TooCostly
from medusa_jax.tree.tree import Tree


@dataclass
class Pending:
    """The pending result of a dispatched program.

    Attributes:
      jobs: the requests that took part, by row of `progress`.
      slots: the cache's slots at that time.
      tree: of its steps; None if it took no steps.
      group: of its steps.
      dispatched: when it was.
    """

    progress: Progress
    jobs: dict[int, Job]
    slots: int
    tree: Tree | None = None
    group: Group | None = None
    dispatched: float = 0.0


class Chunks:
    """Dispatches chunks of steps, and delivers their results.

    Args:
      threads: run the host's work on constraints.

    Attributes:
      most_steps: of a chunk.
      pending: results of dispatched programs, the oldest first.
      finished: number of finished chunks.
    """

    most_steps = 8

    def __init__(
        self, batch: Batch, jobs: Jobs, size: BatchSize, threads: GuideThreads
    ) -> None:
        self._batch, self._jobs, self._size, self._threads = batch, jobs, size, threads
        self.pending: deque[Pending] = deque()
        self.finished = 0
        self._group: Group | None = None  # of the last chunk
        sizes = batch.engines.sizes
        self._ladder = Ladder(sizes, batch.engines.model.trees.tokens(sizes))
        self._queued: set[Programs] = set()  # of faster sizes
        self._ended_at = 0.0  # when the last chunk was seen to end

    @property
    def unseen_tokens(self) -> int:
        """Upper bound on the tokens that dispatched chunks have added to a text but the host has not read."""
        chunks = sum(pending.tree is not None for pending in self.pending)
        return chunks * self.most_steps * self._batch.engines.longest

    def insert(self, job: Job, reading: Reading, at: int) -> None:
        """Put a row that was read or parked into the batch."""
        progress = self._batch.insert(reading, at)
        self._jobs.seat(job, at)
        job.length = max(job.length, len(job.prompt))
        self.pending.append(Pending(progress, {0: job}, self._batch.slots))

    def run(self) -> bool:
        """Dispatch a chunk for the next group of rows; returns whether one can step."""
        running = self._jobs.running
        # A row whose masks are late skips the chunk.
        on_time = {i: job for i, job in running.items() if not self._is_late(job)}
        groups = sorted({job.group for job in on_time.values()})
        groups = [group for group in groups if self._ready_or_refuse(group)]
        if not groups:
            return False
        last = self._group or groups[-1]
        self._group = group = next((g for g in groups if g > last), groups[0])
        jobs = {i: job for i, job in on_time.items() if job.group == group}
        status_B = np.full(self._batch.rows, STOPPED, np.int32)
        status_B[list(self._jobs.running)] = PAUSED
        status_B[list(jobs)] = RUNNING
        sized, start = self._sized(group, list(jobs.values())), time.perf_counter()
        for job in jobs.values():
            job.note_gap(is_plain=not sized.group.drafts)
        rows, costs = self._batch.rows, self._ladder.costs[group]
        engine = self._batch.engines.of_steps(sized.group, rows, sized.nodes)
        seconds = costs.measured(rows, engine.tree.n_nodes) or PACE / FEW_STEPS
        steps = max(1, min(self.most_steps, int(PACE / seconds)))
        guides = {row: job.guide for row, job in jobs.items() if job.guide}
        progress, tree = self._batch.run(
            status_B, sized.group, steps, guides, self._threads.filled, sized.nodes
        )
        self.pending.append(Pending(progress, jobs, self._batch.slots, tree, group, start))
        return True

    def _sized(self, group: Group, jobs: list[Job]) -> Programs:
        """Return the programs of these requests with the size of tree that the ladder chooses."""
        batch, ladder, compiler = self._batch, self._ladder, self._size.compiler
        engines, usual = batch.engines, Programs(group, batch.rows, batch.slots)
        if not (group.drafts and engines.text_is_free(group) and len(engines.sizes) > 1):
            return usual
        sized = {tree.n_nodes: usual._replace(nodes=tree.n_nodes) for tree in engines.sizes}
        sized[1] = usual._replace(group=group._replace(drafts=False))
        first = engines.of_steps(group, batch.rows).tree.n_nodes
        sized[first] = usual  # which are compiled
        ready = [nodes for nodes in sized if compiler.is_ready(sized[nodes])]
        for job in jobs:
            job.counts_3L = ladder.begin() if job.counts_3L is None else job.counts_3L
        counts_R3L = [job.counts_3L for job in jobs if job.counts_3L is not None]
        nodes, fastest = ladder.choose(group, batch.rows, first, counts_R3L, ready)
        wanted = sized[fastest]
        if fastest not in ready and wanted not in self._queued:
            self._queued.add(wanted)
            compiler.queue(wanted)
        return sized[nodes]

    def _is_late(self, job: Job) -> bool:
        return bool(job.guide and self._threads.late(job.guide))

    def _ready_or_refuse(self, group: Group) -> bool:
        """Return whether a group's programs are ready; if not, queue them, or fail its requests."""
        try:
            return self._size.ready_or_queue(group, self._batch.rows, self._batch.slots)
        except NotCompiled as error:
            jobs = self._jobs.running.values()
            self._jobs.refuse([job for job in jobs if job.group == group], error)
            return False

    def deliver_oldest(self) -> None:
        """Wait for a program; deliver finished answers and first tokens at once, other parts at `PACE`."""
        pending = self.pending.popleft()
        pending.progress = jax.tree.map(np.asarray, pending.progress)
        self._note_time(pending)
        self.finished += pending.tree is not None
        for at, job in pending.jobs.items():
            if job.row is None:
                continue  # it ended before
            steps_L = job.see(pending.progress, at, pending.tree)
            if pending.tree and job.counts_3L is not None:
                nodes = pending.tree.n_nodes
                self._ladder.count(job.counts_3L, steps_L, nodes, job.has_gap)
            is_last = pending.progress.status_B[at] not in (RUNNING, PAUSED)
            if is_last or time.perf_counter() - job.delivered_at > PACE / 2:
                self._deliver(job, pending, at)

    def _note_time(self, pending: Pending) -> None:
        """Note how long its steps took: since the chunk before it ended, or since it was dispatched."""
        now = time.perf_counter()
        steps_B, running = pending.progress.steps_B, pending.jobs.items()
        steps = max(int(steps_B[at]) - job.steps_seen for at, job in running)
        if pending.group and pending.tree and steps > 0:
            seconds = now - max(pending.dispatched, self._ended_at)
            costs = self._ladder.costs[pending.group]
            costs.add(len(steps_B), pending.tree.n_nodes, seconds, steps)
        self._ended_at = now

    def _deliver(self, job: Job, pending: Pending, at: int) -> None:
        """Deliver the new part of a request's answer, and free its row at the end."""
        delta = job.take(pending.progress, at)
        if delta.ending:
            error: Stopped | None = None
            self._jobs.free(job, pending.slots)
            if job.guide and job.guide.error:
                error = TooCostly(job.guide.error)
            elif delta.ending.result.finish_reason == "error":
                error = NoScores(NO_SCORES)
            if error is not None:
                job.deliver(replace(delta, ending=None))
                tell([job], error)
                return
        if delta.token_ids or delta.parts or delta.ending:
            job.delivered_at = time.perf_counter()
            job.deliver(delta)
