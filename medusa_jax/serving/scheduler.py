"""Which row takes which request, and when: continuous batching, one turn at a time.

A turn reads one piece of a prompt, or several short prompts, and dispatches one chunk of steps of the
rows that run; then the host looks at the chunk before that. So rows that run stall for no longer than
one piece. A chunk ends when a row does, which is then given away. The host turns tokens into text while
the device has work: what has ended is handed out at once; what continues, after the next dispatch, and not
for every one of many short chunks.

A turn uses only programs that are ready (`programs.py`). A request whose programs are not waits and
lets those after it go first. A text that outgrows the slots which programs are ready for leaves its row
(`parked`) until there are more, since no row can step next to one that is full.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from medusa_jax.api import Model
from medusa_jax.decoding.guides import GuideThreads
from medusa_jax.decoding.stopping import PAUSED, RUNNING, STOPPED
from medusa_jax.serving.batch import PIECE, Batch, Reading
from medusa_jax.serving.job import Group, Job, guides_of, tell
from medusa_jax.serving.programs import NotCompiled, Programs
from medusa_jax.serving.request import Stopped, TooCostly
from medusa_jax.serving.room import InPlace, Known, Room
from medusa_jax.serving.seats import Look, Seat, shared_start
from medusa_jax.tree.tree import Tree

# Short chunks for this many turns after a row frees up, so that a follow-up starts quickly.
FOLLOW_UP_TURNS, FEW_STEPS = 4, 2


class Begun(NamedTuple):
    """A request that has seat `at`, and whose prompt is being read."""

    job: Job
    reading: Reading
    at: int


class Scheduler:
    """Requests in, deltas out. It has no thread: the caller calls `step`.

    Args:
      trees: the numbers of rows that programs are compiled for, the largest is that of the
        slots; and the tree for each.
      most_new: most tokens of an answer.
      chunk_steps: steps between two looks.
      piece: most tokens of a prompt that are read at once, a power of two.
      programs: which are ready; by default all, compiled where they are first needed.
      threads: for the host's work on constraints; by default it is done in place.

    Attributes:
      chunks: how many have come to their end.
    """

    def __init__(
        self,
        model: Model,
        *,
        trees: Mapping[int, Tree],
        most_new: int,
        chunk_steps: int = 8,
        piece: int = PIECE,
        programs: Known | None = None,
        threads: GuideThreads | None = None,
    ) -> None:
        self._batch = Batch(model, trees, most_new, piece)
        self._threads = self._batch.threads = threads
        self._seats = [Seat() for _ in range(max(trees))]
        self._room = Room(self._batch, self._seats, sorted(trees), programs or InPlace())
        self._waiting: deque[Job] = deque()
        self._beginning: Job | None = None  # neither waits nor has a seat
        self._parked: list[tuple[Job, Reading]] = []
        self._reading: Begun | None = None
        self._looks: deque[Look] = deque()
        self._late: dict[int, tuple[Job, Look, int]] = {}
        self._chunk_steps, self._piece = chunk_steps, piece
        self._group = Group(False, "")
        self._turn = self.chunks = 0

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
        """Requests that have none, or have none at the moment."""
        return len(self._waiting) + len(self._parked)

    @property
    def on_device(self) -> list[Job]:
        """Requests that are lost with the rows' state, each once."""
        jobs = [self._beginning, *(job for job, _ in self._parked)]
        jobs += [self._reading.job] if self._reading else []
        jobs += [seat.job for seat in self._seats]
        return list({id(job): job for job in jobs if job}.values())

    def slot_sizes(self, most_tokens: int) -> list[int]:
        """The sizes of the cache for texts of up to this many tokens, rising."""
        lengths = range(1, most_tokens + 1)
        return sorted({self._batch.slots_for(length) for length in lengths})

    def add(self, job: Job) -> None:
        """Have a request answered, after those that came before it."""
        self._waiting.append(job)

    def step(self) -> bool:
        """One turn; returns whether another one has something to do.

        If not, `busy` and `waiting` tell whether there are requests that wait for programs.
        """
        self._turn += 1
        self._drop_cancelled()
        read = self._read()
        ran = self._run()
        self._hand_out()
        # The chunk just dispatched is looked at in the next turn, while the device has another;
        # where a row is about to change hands, at once.
        looks = len(self._looks)
        while len(self._looks) > (
            ran and not self._waiting and not self._expects_follow_up
        ):
            self._look(self._looks.popleft())
            if self._looks:
                self._hand_out()
        return bool(read or ran or looks)

    def fail(self, error: Stopped) -> None:
        """Tell every request that there will be no answer."""
        jobs = [*self.on_device, *(j for j in self._waiting if j is not self._beginning)]
        self._waiting.clear()
        self._forget()
        self._room.empty()
        tell(jobs, error)

    def restart(self, error: Stopped) -> None:
        """Go on with those that wait, after an error that has cost the rows' state.

        Raises:
          Exception: the device holds no new rows, either; it may be called again.
        """
        jobs = self.on_device
        self._waiting = deque(job for job in self._waiting if job is not self._beginning)
        self._forget()
        tell(jobs, error)
        self._room.restart()

    def _forget(self) -> None:
        self._parked, self._reading, self._beginning = [], None, None
        self._looks.clear()
        self._late.clear()
        self._room.empty()

    def _drop_cancelled(self) -> None:
        self._waiting = deque(job for job in self._waiting if not job.handle.cancelled)
        self._parked = [one for one in self._parked if not one[0].handle.cancelled]
        if self._reading and self._reading.job.handle.cancelled:
            self._seats[self._reading.at].job = None
            self._reading = None
        for job in self._room.seated.values():
            if job.handle.cancelled:
                self._free(job, self._batch.slots)

    def _free(self, job: Job, slots: int) -> None:
        """A request gives its row up, which keeps what it can be reused for.

        Args:
          slots: those of the cache when it took its last step. A step of others goes on writing
            what it must for this row after its text, or in the last slots where that is full.
        """
        assert job.seat is not None
        seat = self._seats[job.seat]
        seat.keep(*job.kept(slots - self._batch.widest))
        seat.job, seat.used, job.seat = None, self._turn, None

    def _refuse(self, jobs: Iterable[Job], error: NotCompiled) -> None:
        """Fail and drop requests whose programs cannot be compiled."""
        for job in jobs:
            if job.seat is not None:
                self._free(job, self._batch.slots)
            self._waiting = deque(other for other in self._waiting if other is not job)
            self._parked = [one for one in self._parked if one[0] is not job]
            tell([job], Stopped(f"no program for this request: {error}"))

    # Reading prompts.

    def _read(self) -> bool:
        """Read a piece of the prompt whose turn it is, or as many short prompts as that takes.

        Returns: whether anything was done.
        """
        left, busy = self._piece, self._return_parked()
        while True:
            self._reading = self._reading or self._begin()
            if self._reading is None:
                return busy
            job, reading, at = self._reading
            if not self._room.known(job.group, self._batch.rows, self._batch.slots):
                # Others have made the batch larger meanwhile: from its beginning, another time.
                self._waiting.appendleft(job)
                self._seats[at].job = self._reading = None
                return busy
            left -= self._batch.next_tokens(reading)
            if left < 0:
                return True
            self._batch.read(reading)
            busy = True
            if reading.done:
                self._insert(job, reading, at)
                self._seats[at].keep(reading.prompt, job.drafted)
                self._reading = None

    def _insert(self, job: Job, reading: Reading, at: int) -> None:
        """A row that has been read, or was parked, gets its place."""
        progress = self._batch.insert(reading, at)
        self._seats[at].job, job.seat = job, at
        job.length = max(job.length, len(job.prompt))
        self._looks.append(Look(progress, {0: job}, self._batch.slots, 0))

    def _begin(self) -> Begun | None:
        """The next request that waits and the row that it will have, if there are any."""
        if not self._room.size_with(0)[0]:
            return None
        job = next((job for job in self._waiting if self._fits(job, len(job.prompt))), None)
        if job is None:
            return None
        self._beginning = job  # it gets any error from here on
        self._waiting = deque(other for other in self._waiting if other is not job)
        batch, prompt = self._batch, np.array(job.prompt, np.int32)
        self._room.fit(*self._room.size_with(len(prompt)))
        seats = self._seats[: batch.rows]
        # Drafts need a start that the drafter has read as well.
        known = [seat.drafted if job.request.drafts else len(seat.kept) for seat in seats]
        shared = [shared_start(seat.kept[:n], prompt) for seat, n in zip(seats, known)]
        at, source = self._free_seat(shared), int(np.argmax(shared))
        reading = batch.begin(job.row, source, shared[source], job.group)
        job.reused, job.longest, seats[at].job = reading.position, batch.longest, job
        drafted = seats[source].drafted  # what is read after a gap does not count
        job.drafted = drafted if drafted < reading.position else len(prompt)
        job.begin()
        self._beginning = None
        return Begun(job, reading, at)

    def _free_seat(self, shared: list[int]) -> int:
        """The free row that loses least.

        Args:
          shared: of each row, how many tokens of its text the new one begins with.
        """
        seats = self._seats[: self._batch.rows]

        def lost(i: int) -> tuple[bool, int, int]:
            """A row whose whole text goes on loses nothing, nor does one that has none."""
            if shared[i] == len(seats[i].kept):
                return False, -shared[i], 0
            return True, 0, seats[i].used

        return min((i for i, seat in enumerate(seats) if not seat.job), key=lost)

    def _fits(self, job: Job, length: int) -> bool:
        """Whether a request with a text of this length can have a row now."""
        n_rows, slots = self._room.size_with(length)
        try:
            return bool(n_rows) and self._room.ready(job.group, n_rows, slots)
        except NotCompiled as error:
            # Without room for more rows, it may have one of these once that is free.
            if n_rows == self._batch.rows or slots > self._batch.slots:
                self._refuse([job], error)
            return False

    # Texts that outgrow the slots.

    def _make_room(self) -> None:
        """As many slots as the longest text needs; in time as few as it needs, and few rows."""
        batch = self._batch
        full = {
            at: job
            for at, job in self._room.seated.items()
            if batch.slots_for(job.length) > batch.slots
        }
        if full:
            slots = max(batch.slots_for(job.length) for job in full.values())
            groups = {job.group for job in full.values()}
            try:
                ready = [self._room.ready(g, batch.rows, slots) for g in groups]
                if all(ready):
                    self._room.fit(batch.rows, slots)
                else:
                    self._park(full)
            except NotCompiled as error:
                self._refuse(full.values(), error)
        lengths = {at: job.length for at, job in self._room.seated.items()}
        if self._reading:
            lengths[self._reading.at] = len(self._reading.job.prompt)
        if lengths:
            # The device is ahead of what the host has seen by the chunks that are on their way.
            unseen = sum(look.tree_nodes > 0 for look in self._looks)
            unseen *= self._chunk_steps * batch.longest
            self._room.shrink(list(lengths), list(lengths.values()), unseen)

    def _park(self, full: Mapping[int, Job]) -> None:
        """These rows are kept elsewhere, so that others can step."""
        for at, job in full.items():
            late = self._late.pop(at, None)
            if late and late[0] is job:
                self._take(*late)
            if job.seat is not None:
                self._parked.append((job, self._batch.take(at, job.group)))
                self._free(job, self._batch.slots)

    def _return_parked(self) -> bool:
        """Rows that have room now get a place again; returns whether there was one."""
        parked = len(self._parked)
        for job, reading in list(self._parked):
            if self._fits(job, job.length):
                self._room.fit(*self._room.size_with(job.length))
                at = self._free_seat([0] * self._batch.rows)
                self._insert(job, reading, at)
                self._seats[at].keep(*job.kept(self._batch.slots))
                self._parked = [one for one in self._parked if one[0] is not job]
        return len(self._parked) < parked

    # Steps.

    def _run(self) -> bool:
        """Dispatch a chunk for the next group of rows; whether there was one."""
        self._make_room()
        # A row whose masks are late sits out.
        jobs = {i: job for i, job in self._room.seated.items() if not self._is_late(job)}
        groups = [g for g in sorted({j.group for j in jobs.values()}) if self._can_step(g)]
        if not groups:
            return False
        self._group = next((g for g in groups if g > self._group), groups[0])
        wanted_B = np.full(self._batch.rows, STOPPED, np.int32)
        chosen = {i: job for i, job in jobs.items() if job.group == self._group}
        wanted_B[list(self._room.seated)] = PAUSED
        wanted_B[list(chosen)] = RUNNING
        few = min(FEW_STEPS, self._chunk_steps)
        steps = few if self._expects_follow_up else self._chunk_steps
        how = wanted_B, self._group, steps, few
        progress, nodes = self._batch.run(*how, guides_of(chosen))
        self._looks.append(Look(progress, chosen, self._batch.slots, nodes))
        return True

    def _is_late(self, job: Job) -> bool:
        return bool(job.guide and self._threads and self._threads.late(job.guide))

    def _can_step(self, group: Group) -> bool:
        """Whether a group's programs are ready; fails its requests if they cannot be compiled."""
        batch = self._batch
        try:
            return self._room.programs.ready(Programs(group, batch.rows, batch.slots))
        except NotCompiled as error:
            jobs = self._room.seated.values()
            self._refuse([job for job in jobs if job.group == group], error)
            return False

    @property
    def _expects_follow_up(self) -> bool:
        """A row has just become free and may soon be wanted."""
        free = (seat for seat in self._seats[: self._batch.rows] if not seat.job)
        return any(self._turn - seat.used < FOLLOW_UP_TURNS for seat in free)

    # Results.

    def _look(self, look: Look) -> None:
        """Wait for a program; hand out what has ended, and leave the rest for `_hand_out`."""
        look.progress = jax.tree.map(np.asarray, look.progress)
        self.chunks += look.tree_nodes > 0
        for row, job in look.jobs.items():
            if job.seat is None:
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
            if job.seat != seat:
                continue
            steps = look.progress.steps_B[row] - job.steps
            if job.token_ids and steps < self._chunk_steps / 2:
                self._late[seat] = job, look, row
            else:
                self._take(job, look, row)

    def _take(self, job: Job, look: Look, row: int) -> None:
        delta = job.take(look.progress, row)
        if delta.ending:
            self._free(job, look.slots)
            if job.guide and job.guide.error:
                job.deliver(replace(delta, ending=None))
                tell([job], TooCostly(job.guide.error))
                return
        if delta.token_ids or delta.parts or delta.ending:
            job.deliver(delta)
