"""Continuous batching, one turn at a time: assigns requests to rows.

A turn reads one piece of a prompt, or several short prompts, and dispatches one chunk of steps; then the
host reads the previous chunk's results. Running rows therefore stall for at most one piece. A chunk takes
about `PACE` seconds, and ends when a row ends, so that the next request gets the row. The host decodes and
delivers text while the device works: first tokens and ends at once, other parts once per `PACE`.

A turn uses only programs that are ready (`programs.py`). A request whose programs are not ready waits and
lets later ones go first. If a text outgrows the slots for which programs are ready, its row is parked
until larger programs exist, since no row can step next to a full one.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from medusa_jax.api import Model
from medusa_jax.api.dialogue import shared_start
from medusa_jax.decoding.state import Progress
from medusa_jax.decoding.stopping import PAUSED, RUNNING, STOPPED
from medusa_jax.errors import first_line
from medusa_jax.serving.batch import Batch, Reading
from medusa_jax.serving.echo import PIECE
from medusa_jax.serving.guide_threads import GuideThreads
from medusa_jax.serving.job import Group, Job
from medusa_jax.serving.programs import Compiler, NotCompiled, Programs
from medusa_jax.serving.request import Stopped, TooCostly
from medusa_jax.serving.room import Room, Row
from medusa_jax.tree.tree import Tree

# Seconds of a chunk and between the pieces of a stream: shorter ones only cost dispatches.
PACE = 0.04
# Steps of a chunk before the time of a step is known, and most steps if one of its rows had already ended.
FEW_STEPS = 2


class Begun(NamedTuple):
    """A request whose prompt is being read, and its row `at`."""

    job: Job
    reading: Reading
    at: int


@dataclass
class Pending:
    """The pending result of a dispatched program.

    Attributes:
      jobs: the requests that took part, by row of `progress`.
      slots: the cache's slots at that time.
      tree_nodes: nodes of its steps' tree; 0 if it took no steps.
      group, rows: its steps' group, and rows of the batch.
      dispatched: when it was.
    """

    progress: Progress
    jobs: dict[int, Job]
    slots: int
    tree_nodes: int
    group: Group | None = None
    rows: int = 0
    dispatched: float = 0.0


class Scheduler:
    """Requests in, deltas out. It has no thread: the caller calls `step`.

    Args:
      trees: the tree for each number of rows to compile programs for; the largest number is the number of
        requests answered at a time.
      most_new: most tokens of an answer.
      programs: tells which programs are compiled.
      chunk_steps: most steps of a chunk.
      piece: most tokens of a piece of a prompt, a power of two.
      threads: run the host's work on constraints; by default the caller's thread does.

    Attributes:
      chunks: number of finished chunks.
    """

    def __init__(
        self,
        model: Model,
        *,
        trees: Mapping[int, Tree],
        most_new: int,
        programs: Compiler,
        chunk_steps: int = 8,
        piece: int = PIECE,
        threads: GuideThreads | None = None,
    ) -> None:
        self._batch = Batch(model, trees, most_new, piece)
        self._threads = self._batch.threads = threads
        self._rows = [Row() for _ in range(max(trees))]
        self._room = Room(self._batch, self._rows, sorted(trees), programs)
        self._waiting: deque[Job] = deque()
        self._parked: list[tuple[Job, Reading]] = []
        self._reading: Begun | None = None
        self._pending: deque[Pending] = deque()
        self._chunk_steps, self._piece = chunk_steps, piece
        self._group = Group(False, "")
        self._turn = self.chunks = 0
        self._seconds: dict[tuple[Group, int], float] = {}  # of a step, by group and rows
        self._looked = 0.0  # when the last chunk was seen to end

    @property
    def slots(self) -> int:
        """Requests that can be answered at a time."""
        return len(self._rows)

    @property
    def busy(self) -> int:
        """Rows that have a request."""
        return sum(row.job is not None for row in self._rows)

    @property
    def waiting(self) -> int:
        """Requests without a row, parked ones included."""
        return len(self._waiting) + len(self._parked)

    @property
    def on_device(self) -> list[Job]:
        """Requests that are lost if the rows' state is lost."""
        jobs = [row.job for row in self._rows if row.job]
        return [*jobs, *(job for job, _ in self._parked if job not in jobs)]

    def slot_sizes(self, most_tokens: int) -> list[int]:
        """Return the cache sizes for texts of up to this many tokens, ascending."""
        lengths = range(1, most_tokens + 1)
        return sorted({self._batch.slots_for(length) for length in lengths})

    def add(self, job: Job) -> None:
        """Queue a request."""
        self._waiting.append(job)

    def step(self) -> bool:
        """Take one turn; returns whether work is left for another.

        If not, `busy` and `waiting` show whether requests wait for programs.
        """
        self._turn += 1
        self._drop_cancelled()
        read = self._read()
        ran = self._run()
        # Leave the chunk just dispatched to the next turn, which first gives the device another, unless a
        # row is about to get a new request.
        pending = len(self._pending)
        wait_for_next = ran and not self._waiting
        while len(self._pending) > wait_for_next:
            self._look(self._pending.popleft())
        return bool(read or ran or pending)

    def fail(self, error: Stopped) -> None:
        """Tell every request that it gets no answer."""
        jobs = [*self.on_device, *self._waiting]
        self._waiting.clear()
        self._forget()
        tell(jobs, error)

    def restart(self, error: Stopped) -> None:
        """Continue with the queue after an error that destroyed the rows' state.

        Raises:
          Exception: the device cannot hold new rows either.
        """
        jobs = self.on_device
        self._forget()
        tell(jobs, error)
        self._batch.restart()

    def _forget(self) -> None:
        self._parked, self._reading = [], None
        self._pending.clear()
        self._room.empty()

    def _drop_cancelled(self) -> None:
        self._waiting = deque(job for job in self._waiting if not job.handle.cancelled)
        self._parked = [one for one in self._parked if not one[0].handle.cancelled]
        if self._reading and self._reading.job.handle.cancelled:
            self._rows[self._reading.at].job = None
            self._reading = None
        for job in self._room.running.values():
            if job.handle.cancelled:
                self._free(job, self._batch.slots)

    def _free(self, job: Job, slots: int) -> None:
        """Take a request's row away; the row keeps its text for reuse.

        Args:
          slots: the cache's slots at the request's last step. Later steps keep writing after this row's
            text, or to the last slots if it is full.
        """
        assert job.row is not None
        row = self._rows[job.row]
        row.keep(*job.cached(slots - self._batch.widest))
        row.job, row.used, job.row = None, self._turn, None

    def _refuse(self, jobs: Iterable[Job], error: NotCompiled) -> None:
        """Fail requests whose programs cannot be compiled."""
        for job in jobs:
            if job.row is not None:
                self._free(job, self._batch.slots)
            if job in self._waiting:
                self._waiting.remove(job)
            self._parked = [one for one in self._parked if one[0] is not job]
            tell([job], Stopped(f"no program for this request: {error}"))

    # Reading prompts.

    def _read(self) -> bool:
        """Read the next piece of a prompt, or as many short prompts; returns whether any was read."""
        left, busy = self._piece, self._return_parked()
        while True:
            self._reading = self._reading or self._begin()
            if self._reading is None:
                return busy
            job, reading, at = self._reading
            if not self._room.known(job.group, self._batch.rows, self._batch.slots):
                # The batch has grown for others meanwhile: read the prompt again later.
                self._waiting.appendleft(job)
                self._rows[at].job = self._reading = None
                return busy
            left -= self._batch.next_tokens(reading)
            if left < 0:
                return True
            self._batch.read(reading)
            busy = True
            if reading.done:
                self._insert(job, reading, at)
                self._rows[at].keep(reading.prompt, job.drafted)
                self._reading = None

    def _insert(self, job: Job, reading: Reading, at: int) -> None:
        """Put a row that was read or parked into the batch."""
        progress = self._batch.insert(reading, at)
        self._rows[at].job, job.row = job, at
        job.length = max(job.length, len(job.prompt))
        self._pending.append(Pending(progress, {0: job}, self._batch.slots, 0))

    def _begin(self) -> Begun | None:
        """Give a row to the first request of the queue that can have one."""
        if not self._room.size_with(0)[0]:
            return None
        waiting = list(self._waiting)  # `_fits` may refuse some
        job = next((job for job in waiting if self._fits(job, len(job.prompt))), None)
        if job is None:
            return None
        self._waiting.remove(job)
        try:
            return self._given_row(job)
        except Exception as error:  # the job is in no queue, so report the error here
            tell([job], Stopped(f"a step failed: {first_line(error)}"))
            raise

    def _given_row(self, job: Job) -> Begun:
        batch, prompt = self._batch, np.array(job.prompt, np.int32)
        self._room.fit(*self._room.size_with(len(prompt)))
        rows = self._rows[: batch.rows]
        # With drafts, the drafter must have read the shared start too.
        known = [row.drafted if job.request.drafts else len(row.cached) for row in rows]
        shared = [shared_start(row.cached[:n], prompt) for row, n in zip(rows, known)]
        at, source = self._free_row(shared), int(np.argmax(shared))
        reading = batch.begin(job.decode, source, shared[source], job.group)
        job.begin(reading.position, rows[source].drafted)
        rows[at].job = job
        return Begun(job, reading, at)

    def _free_row(self, shared: list[int]) -> int:
        """Return the free row whose text is the smallest loss.

        Args:
          shared: for each row, the length of its longest common prefix with the new text.
        """
        rows = self._rows[: self._batch.rows]

        def loss(i: int) -> tuple[bool, int, int]:
            """First rows whose whole text the new one continues, then the least recently used."""
            if shared[i] == len(rows[i].cached):
                return False, -shared[i], 0
            return True, 0, rows[i].used

        return min((i for i, row in enumerate(rows) if not row.job), key=loss)

    def _fits(self, job: Job, length: int) -> bool:
        """Return whether a request with a text of this length can have a row now."""
        n_rows, slots = self._room.size_with(length)
        try:
            return bool(n_rows) and self._room.ready(job.group, n_rows, slots)
        except NotCompiled as error:
            # If only a larger batch fails to compile, the request can wait for an existing row.
            if n_rows == self._batch.rows or slots > self._batch.slots:
                self._refuse([job], error)
            return False

    # Texts that outgrow the slots.

    def _make_room(self) -> None:
        """Grow to the slots that the longest text needs; shrink after a while."""
        batch, room = self._batch, self._room
        full = {
            at: job
            for at, job in room.running.items()
            if batch.slots_for(job.length) > batch.slots
        }
        if full:
            slots = max(batch.slots_for(job.length) for job in full.values())
            try:
                groups = {job.group for job in full.values()}
                ready = [room.ready(group, batch.rows, slots) for group in groups]
                if all(ready):
                    room.fit(batch.rows, slots)
                else:
                    self._park(full)
            except NotCompiled as error:
                self._refuse(full.values(), error)
        lengths = {at: job.length for at, job in room.running.items()}
        if self._reading:
            lengths[self._reading.at] = len(self._reading.job.prompt)
        if lengths:
            # The device is ahead of the host by the pending chunks.
            chunks = sum(pending.tree_nodes > 0 for pending in self._pending)
            room.shrink(lengths, chunks * self._chunk_steps * batch.longest)

    def _park(self, full: Mapping[int, Job]) -> None:
        """Take these rows out of the batch, so that others can step."""
        for at, job in full.items():
            self._parked.append((job, self._batch.take(at, job.group)))
            self._free(job, self._batch.slots)

    def _return_parked(self) -> bool:
        """Put parked rows back that fit now; returns whether any did."""
        parked = len(self._parked)
        for job, reading in list(self._parked):
            if self._fits(job, job.length):
                self._room.fit(*self._room.size_with(job.length))
                at = self._free_row([0] * self._batch.rows)
                self._insert(job, reading, at)
                self._rows[at].keep(*job.cached(self._batch.slots))
                self._parked = [one for one in self._parked if one[0] is not job]
        return len(self._parked) < parked

    # Steps.

    def _run(self) -> bool:
        """Dispatch a chunk for the next group of rows; returns whether one can step."""
        self._make_room()
        running = self._room.running
        # A row whose masks are late skips the chunk.
        jobs = {i: job for i, job in running.items() if not self._is_late(job)}
        groups = [g for g in sorted({j.group for j in jobs.values()}) if self._can_step(g)]
        if not groups:
            return False
        self._group = next((g for g in groups if g > self._group), groups[0])
        chosen = {i: job for i, job in jobs.items() if job.group == self._group}
        wanted_B = np.full(self._batch.rows, STOPPED, np.int32)
        wanted_B[list(self._room.running)] = PAUSED
        wanted_B[list(chosen)] = RUNNING
        kind = self._group, self._batch.rows
        seconds, start = self._seconds.get(kind, PACE / FEW_STEPS), time.perf_counter()
        steps = max(1, min(self._chunk_steps, int(PACE / seconds)))
        guides = {row: job.guide for row, job in chosen.items() if job.guide}
        few = min(FEW_STEPS, steps)
        progress, nodes = self._batch.run(wanted_B, self._group, steps, few, guides)
        self._pending.append(
            Pending(progress, chosen, self._batch.slots, nodes, *kind, start)
        )
        return True

    def _is_late(self, job: Job) -> bool:
        return bool(job.guide and self._threads and self._threads.late(job.guide))

    def _can_step(self, group: Group) -> bool:
        """Return whether a group's programs are ready; fail its requests if they cannot be compiled."""
        batch = self._batch
        try:
            return self._room.programs.ready(Programs(group, batch.rows, batch.slots))
        except NotCompiled as error:
            jobs = self._room.running.values()
            self._refuse([job for job in jobs if job.group == group], error)
            return False

    # Results.

    def _look(self, pending: Pending) -> None:
        """Wait for a program; deliver finished answers and first tokens at once, other parts at `PACE`."""
        pending.progress = jax.tree.map(np.asarray, pending.progress)
        self._time(pending)
        self.chunks += pending.tree_nodes > 0
        for at, job in pending.jobs.items():
            if job.row is None:
                continue  # it ended before
            job.tree_nodes = pending.tree_nodes or job.tree_nodes
            job.length = int(pending.progress.length_B[at])
            job.steps_seen = int(pending.progress.steps_B[at])
            ended = pending.progress.status_B[at] not in (RUNNING, PAUSED)
            if ended or time.perf_counter() - job.delivered_at > PACE / 2:
                self._take(job, pending, at)

    def _time(self, pending: Pending) -> None:
        """Note how long its steps took: since the chunk before it ended, or since it was dispatched."""
        now = time.perf_counter()
        steps_B, running = pending.progress.steps_B, pending.jobs.items()
        taken = max(int(steps_B[at]) - job.steps_seen for at, job in running)
        if pending.group and taken > 0:
            kind = pending.group, pending.rows
            seconds = max(1e-6, now - max(pending.dispatched, self._looked)) / taken
            self._seconds[kind] = (self._seconds.get(kind, seconds) + seconds) / 2
        self._looked = now

    def _take(self, job: Job, pending: Pending, at: int) -> None:
        delta = job.take(pending.progress, at)
        if delta.ending:
            self._free(job, pending.slots)
            if job.guide and job.guide.error:
                job.deliver(replace(delta, ending=None))
                tell([job], TooCostly(job.guide.error))
                return
        if delta.token_ids or delta.parts or delta.ending:
            job.delivered_at = time.perf_counter()
            job.deliver(delta)


def tell(jobs: Iterable[Job], error: Stopped) -> None:
    """Deliver an error to these requests; a failed delivery does not affect the others."""
    for job in jobs:
        with contextlib.suppress(Exception):
            job.deliver(error)
