"""Which row takes which request, and when: continuous batching, one turn at a time.

A turn reads one piece of a prompt, or several short prompts, and dispatches one chunk of steps of the
rows that run; then the host looks at the chunk before that. So rows that run stall for no longer than
one piece. A chunk ends when a row does, which is then given away. The host turns tokens into text while
the device has work: what has ended is handed out at once; what goes on behind the next dispatch, and not
for every one of many short chunks.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from medusa_jax.api import Model
from medusa_jax.decoding.prefill import PIECE
from medusa_jax.decoding.stopping import PAUSED, RUNNING, STOPPED
from medusa_jax.serving.batch import Batch, Reading
from medusa_jax.serving.job import Job
from medusa_jax.serving.request import Stopped
from medusa_jax.serving.seats import Look, Seat, shared_start
from medusa_jax.tree import Tree

# After so many turns that needed fewer rows or slots than there are, there are fewer.
PATIENCE = 64
# Whoever has been answered may ask again: for so many turns a row that is free makes chunks this short.
HOPE, FEW_STEPS = 4, 2


class Scheduler:
    """Requests in, deltas out. It has no thread of its own: somebody calls `step`.

    Args:
      trees: the numbers of rows that programs are compiled for, the largest is that of the
        slots; and the tree for each.
      most_new: most tokens of an answer.
      chunk_steps: steps between two looks.
      piece: most tokens of a prompt that are read at once, a power of two.
    """

    def __init__(
        self,
        model: Model,
        *,
        trees: Mapping[int, Tree],
        most_new: int,
        chunk_steps: int = 8,
        piece: int = PIECE,
    ) -> None:
        self.sizes = sorted(trees)
        self._batch = Batch(model, trees, most_new, piece)
        self._seats = [Seat() for _ in range(self.sizes[-1])]
        self._waiting: deque[Job] = deque()
        self._reading: tuple[Job, Reading, int] | None = None
        self._looks: deque[Look] = deque()
        self._late: dict[int, tuple[Job, Look, int]] = {}
        self._chunk_steps, self._piece = chunk_steps, piece
        self._group: tuple[bool, str] = (False, "")
        self._turn = self._roomy = 0

    @property
    def slots(self) -> int:
        """Requests that can be answered at a time."""
        return len(self._seats)

    @property
    def busy(self) -> int:
        """Slots that have a request."""
        return sum(seat.job is not None for seat in self._seats)

    @property
    def waiting(self) -> int:
        """Requests that have none yet."""
        return len(self._waiting)

    def warm_up(
        self, most_tokens: int, groups: Sequence[tuple[bool, str]]
    ) -> Iterator[None]:
        """Compile ahead, see `Batch.warm_up`; a part at a time, while nothing is being answered."""
        for _ in self._batch.warm_up(most_tokens, groups):
            self._seats = [Seat() for _ in self._seats]
            yield

    def add(self, job: Job) -> None:
        """Have a request answered, after those that came before it."""
        self._waiting.append(job)

    def step(self) -> bool:
        """One turn; returns whether another one is needed."""
        self._turn += 1
        self._drop_cancelled()
        self._read()
        ran = self._run()
        self._hand_out()
        # The chunk just dispatched is looked at in the next turn, while the device has another;
        # where a row is about to change hands, at once.
        while len(self._looks) > (ran and not self._waiting and not self._hopes):
            self._look(self._looks.popleft())
            if self._looks:
                self._hand_out()
        return bool(self._waiting or self._reading or self._looks or self.busy)

    def fail(self, error: Stopped) -> None:
        """Tell every request that there will be no answer."""
        for job in [*self._waiting, *(s.job for s in self._seats if s.job)]:
            job.deliver(error)
        self._waiting.clear()

    def _drop_cancelled(self) -> None:
        self._waiting = deque(job for job in self._waiting if not job.handle.cancelled)
        if self._reading and self._reading[0].handle.cancelled:
            self._seats[self._reading[2]].job = None
            self._reading = None
        for seat in self._seats:
            job = seat.job
            if job and job.seat is not None and job.handle.cancelled:
                self._free(seat, self._batch.slots)

    def _free(self, seat: Seat, slots: int) -> None:
        """The request is answered, or nobody wants it: its row keeps what it can be reused for.

        Args:
          slots: those of the cache when it took its last step. A step of others goes on writing
            what it must for this row behind its text, or in the last slots where that is full.
        """
        assert seat.job
        job, text = seat.job, seat.job.known_text()
        drafted = len(text) if job.request.drafts else job.drafted
        seat.keep(text[: slots - self._batch.widest], drafted)
        seat.job, seat.used = None, self._turn

    # Reading prompts.

    def _read(self) -> None:
        """Read a piece of the prompt whose turn it is, or as many short prompts as that takes."""
        left = self._piece
        while True:
            self._reading = self._reading or self._begin()
            if self._reading is None:
                return
            job, reading, at = self._reading
            left -= self._batch.next_tokens(reading)
            if left < 0:
                return
            self._batch.read(reading)
            if reading.done:
                self._insert(job, reading, at)
                self._reading = None

    def _insert(self, job: Job, reading: Reading, at: int) -> None:
        """A prompt that has been read gets its row."""
        seat, job.seat, job.length = self._seats[at], at, len(job.prompt)
        seat.keep(reading.prompt, job.drafted)
        progress = self._batch.insert(reading, at)
        self._looks.append(Look(progress, {0: job}, self._batch.slots, 0))

    def _begin(self) -> tuple[Job, Reading, int] | None:
        """The next request that waits and the row that it will have, if one is free."""
        if not self._waiting:
            return None
        batch = self._batch
        if all(seat.job for seat in self._seats[: batch.rows]):
            more = [n for n in self.sizes if n > batch.rows]
            if not more:
                return None
            self._fit(more[0], batch.slots)
        job = self._waiting.popleft()
        busy = [job, *(seat.job for seat in self._seats if seat.job)]
        batch.keep_logprobs(any(one.options.logprobs is not None for one in busy))
        prompt = np.array(job.prompt, np.int32)
        seats = self._seats[: batch.rows]
        # Drafts need a start that the drafter has taken in as well.
        known = [seat.drafted if job.request.drafts else len(seat.kept) for seat in seats]
        shared = [shared_start(seat.kept[:n], prompt) for seat, n in zip(seats, known)]

        def lost(i: int) -> tuple[bool, int, int]:
            """A row whose whole text goes on loses nothing, nor does one that has none."""
            if shared[i] == len(seats[i].kept):
                return False, -shared[i], 0
            return True, 0, seats[i].used

        at = min((i for i, seat in enumerate(seats) if not seat.job), key=lost)
        self._fit(batch.rows, max(batch.slots, batch.slots_for(len(prompt))))
        source = int(np.argmax(shared))
        reading = batch.begin(job.row, source, shared[source], job.request.acceptance)
        job.reused, job.longest, seats[at].job = reading.position, batch.longest, job
        drafted = seats[source].drafted  # what is read behind a gap does not count
        job.drafted = drafted if drafted < reading.position else len(prompt)
        job.begin()
        return job, reading, at

    # Steps.

    def _run(self) -> bool:
        """Dispatch a chunk for the next group of rows; whether there was one."""
        jobs = {
            i: s.job for i, s in enumerate(self._seats) if s.job and s.job.seat is not None
        }
        if not jobs:
            return False
        groups = sorted({job.group for job in jobs.values()})
        self._group = next((g for g in groups if g > self._group), groups[0])
        self._make_room(jobs)
        wanted_B = np.full(self._batch.rows, STOPPED, np.int32)
        chosen = {i: job for i, job in jobs.items() if job.group == self._group}
        wanted_B[list(jobs)] = PAUSED
        wanted_B[list(chosen)] = RUNNING
        drafts, rule = self._group
        if rule == "auto":
            sampled = any(job.options.temperature > 0 for job in chosen.values())
            rule = "sampled" if sampled else "greedy"
        few = min(FEW_STEPS, self._chunk_steps)
        steps = few if self._hopes else self._chunk_steps
        progress, nodes = self._batch.run(wanted_B, drafts, rule, steps, few)
        self._looks.append(Look(progress, chosen, self._batch.slots, nodes))
        return True

    @property
    def _hopes(self) -> bool:
        """A row has just become free and may soon be wanted."""
        seats = self._seats[: self._batch.rows]
        return any(not s.job and self._turn - s.used < HOPE for s in seats)

    def _make_room(self, jobs: dict[int, Job]) -> None:
        """As many slots as the longest text needs; in time as few as it needs, and few rows."""
        batch = self._batch
        lengths, last = [job.length for job in jobs.values()], max(jobs)
        if self._reading:
            job, _, at = self._reading
            lengths.append(len(job.prompt))
            last = max(last, at)
        self._fit(batch.rows, max(batch.slots, batch.slots_for(max(lengths))))
        # The device is ahead of what the host has seen by the chunks that are on their way.
        unseen = sum(look.tree_nodes > 0 for look in self._looks)
        longest = max(lengths) + unseen * self._chunk_steps * batch.longest
        slots = min(batch.slots, batch.slots_for(longest))
        n_rows = next(n for n in self.sizes if n > last)
        fewer = n_rows < batch.rows or slots < batch.slots
        self._roomy = self._roomy + 1 if fewer else 0
        if self._roomy == PATIENCE:
            self._fit(n_rows, slots)
            self._roomy = 0

    def _fit(self, n_rows: int, slots: int) -> None:
        """Another size of the batch; where it is smaller, rows keep less of their texts."""
        if slots < self._batch.slots:
            for seat in self._seats:
                seat.keep(seat.kept[: slots - self._batch.widest], seat.drafted)
        for seat in self._seats[n_rows:]:
            seat.keep(seat.kept[:0], 0)
        self._batch.fit(n_rows, slots)

    # Results.

    def _look(self, look: Look) -> None:
        """Wait for a program; hand out what has ended, and leave the rest for `_hand_out`."""
        look.progress = jax.tree.map(np.asarray, look.progress)
        for row, job in look.jobs.items():
            if job.seat is None or not self._has_seat(job):
                continue  # it ended before
            self._late.pop(job.seat, None)
            job.tree_nodes = look.tree_nodes or job.tree_nodes
            job.length = int(look.progress.length_B[row])
            if look.progress.status_B[row] in (RUNNING, PAUSED):
                self._late[job.seat] = job, look, row
            else:
                self._take(job, look, row)

    def _hand_out(self) -> None:
        """What is new of texts that go on: the first token at once, else that of a few steps."""
        late, self._late = self._late, {}
        for seat, (job, look, row) in late.items():
            if not self._has_seat(job):
                continue
            steps = look.progress.steps_B[row] - job.steps
            if job.token_ids and steps < self._chunk_steps / 2:
                self._late[seat] = job, look, row
            else:
                self._take(job, look, row)

    def _has_seat(self, job: Job) -> bool:
        return job.seat is not None and self._seats[job.seat].job is job

    def _take(self, job: Job, look: Look, row: int) -> None:
        assert job.seat is not None
        delta = job.take(look.progress, row)
        if delta.ending:
            self._free(self._seats[job.seat], look.slots)
        if delta.token_ids or delta.parts or delta.ending:
            job.deliver(delta)
