"""A model that answers many requests at a time: a queue, and a thread that takes the turns."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from medusa_jax.api import Model
from medusa_jax.console import log
from medusa_jax.constraints.guide import SLOW_MASKS, Patience
from medusa_jax.errors import between, first_line
from medusa_jax.serving.batch import LEAST_SLOTS, Batch
from medusa_jax.serving.engines import Engines
from medusa_jax.serving.guide_threads import GuideThreads
from medusa_jax.serving.job import BASE, LIKELY, Group, Job, make_job
from medusa_jax.serving.programs import Compiler, Planned, Programs, ScoringPrograms
from medusa_jax.serving.request import Busy, Deliver, Delta, Handle, Request, Stopped
from medusa_jax.serving.scheduler import Scheduler
from medusa_jax.tree.tree import Tree
from medusa_jax.typed import checked_arguments

if TYPE_CHECKING:
    from medusa_jax.learning.learner import Learner

# The server ends after this many errors without a finished chunk between them.
MOST_FAILURES = 3


def row_sizes(slots: int) -> list[int]:
    """Return powers of two up to `slots`, and `slots`: idle rows cost time as well."""
    sizes = [1]
    while sizes[-1] < slots:
        sizes.append(min(2 * sizes[-1], slots))
    return sizes


class Server:
    """One model, many requests, each answered as if it were alone.

    Args:
      slots: requests answered at a time.
      trees: for each number of rows to compile programs for, the tree of its steps; the largest number is how
        many requests are answered at a time. By default `row_sizes` and the model's own trees. Chunks may take
        other sizes of these (`ladder.py`).
      queue: requests that may wait for a slot.
      max_prompt_tokens: most tokens of a prompt; by default the context.
      max_new_tokens: most tokens of an answer; by default the context.
      learner: trains the draft heads on finished answers while no request runs.

    Example:
      with Server(model, slots=8) as server:
          for delta in server.submit(Request("def parse(", Options(max_new_tokens=50))):
              print(delta.text, end="")
    """

    @checked_arguments()
    def __init__(
        self,
        model: Model,
        *,
        slots: int = 8,
        trees: Mapping[int, Tree] | None = None,
        queue: int = 64,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
        learner: "Learner | None" = None,
    ) -> None:
        context = model.config.max_position
        numbers = {
            "slots": slots,
            "queue": queue,
            "max_prompt_tokens": context
            if max_prompt_tokens is None
            else max_prompt_tokens,
            "max_new_tokens": context if max_new_tokens is None else max_new_tokens,
        }
        for name, number in numbers.items():
            between(name, number, 1, 2**31 - 1)
        tree_of = dict(trees or {})
        for rows in tree_of:
            between("the number of rows of a tree", rows, 1, slots)
        self.model = model
        self.queue = queue
        self.most_prompt = min(numbers["max_prompt_tokens"], context - 1)
        self.most_new = min(numbers["max_new_tokens"], context)
        self._trees = tree_of or {rows: model.tree_at(rows) for rows in row_sizes(slots)}
        usual = BASE._replace(penalties=model.repetition_penalty != 1)
        self._first = Programs(usual, min(self._trees), LEAST_SLOTS)
        self._wake = threading.Condition()
        self._inbox: list[Job] = []
        self._arrivals: dict[float, int] = {}  # numbers of requests by their time
        piece, engines = model.llama.kernels.prompt_piece, Engines(model, self._trees)
        make_batch = partial(Batch, engines, self.most_new, piece)
        self._compiler = Compiler(make_batch, self._notify, lambda: self.idle)
        self._threads = GuideThreads(self._notify)
        self._scheduler = Scheduler(make_batch(), self._compiler, self._threads)
        self._closing = self._changed = False
        self._failures = self._chunks = 0
        self._error: BaseException | None = None
        self._when_failed: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._serve, name="decoding", daemon=True)
        self._thread.start()
        self.learner = learner
        if learner:
            learner.start(lambda: self.idle)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def slots(self) -> int:
        """Requests answered at a time."""
        return self._scheduler.slots

    @property
    def busy(self) -> int:
        """Slots that have a request."""
        return self._scheduler.busy

    @property
    def preparing(self) -> int:
        """Number of HTTP requests that are still being tokenised or scored, or whose constraints are being compiled."""
        return sum([*self._arrivals.values()])

    @property
    def _queued(self) -> int:
        return self._scheduler.waiting + len(self._inbox)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return self.preparing + self._queued

    @property
    def idle(self) -> bool:
        """Whether no request waits or is being answered."""
        return not (self.busy or self.waiting)

    @property
    def running(self) -> bool:
        """Whether the server accepts requests."""
        return not self._closing and self._error is None

    @property
    def ready(self) -> bool:
        """Whether no program that `prepare` asked for is left to compile."""
        return not self._compiler.is_queued(self._first)

    @property
    def failed(self) -> bool:
        """Whether errors have ended the server."""
        return self._error is not None

    def submit(self, request: Request) -> Handle:
        """Queue a request; iterate over the handle for its deltas.

        Raises:
          UserError: the model cannot answer it.
          Busy: the queue is full.
          Stopped: the server is closed.
        """
        return self.submit_all([request])[0]

    @contextmanager
    def arriving(self, n: int, *, waits: bool) -> Iterator[float]:
        """Count requests as waiting until the block has submitted them; yields when they came.

        Raises:
          Busy: the queue is full, and they wait for others that are being prepared.
        """
        with self._wake:
            if waits:
                self._check_queue(self.waiting)
            now = time.perf_counter()
            self._arrivals[now] = n
        try:
            yield now
        finally:
            if self._arrivals.pop(now, 0):
                self._notify()  # the server may be idle

    def _check_queue(self, waiting: int) -> None:
        if waiting >= self.queue:
            raise Busy(f"{waiting} requests are waiting already")

    def submit_all(
        self,
        requests: Sequence[Request],
        deliver: Sequence[Deliver] | None = None,
        arrived: float | None = None,
    ) -> list[Handle]:
        """Queue several requests, or none of them if one is refused; a queue with room takes them all.

        Args:
          deliver: for each request, a function to call with its deltas, instead of the handle.
          arrived: when they came; by default now.

        Raises:
          UserError, Busy, Stopped: as for `submit`.
        """
        handles = [Handle(self._notify) for _ in requests]
        delivers = deliver or [handle.deliver for handle in handles]
        jobs = [
            make_job(self.model, request, self.most_prompt, self.most_new, handle, each)
            for request, handle, each in zip(requests, handles, delivers)
        ]
        patience = Patience(SLOW_MASKS)  # of all choices of one call
        for job in jobs:
            job.submitted_at = arrived or job.submitted_at
            if job.guide:
                job.guide.patience = patience
            if self.learner:
                job.deliver = partial(self._deliver, job, job.deliver)
        with self._wake:
            if not self.running:
                raise Stopped("the server is closed")
            self._check_queue(self._queued)
            self._arrivals.pop(arrived or 0.0, 0)
            self._inbox += jobs
            self._wake.notify()
        return handles

    def _deliver(self, job: Job, deliver: Deliver, part: Delta | Stopped) -> None:
        """Deliver a part of an answer; at its end the learner gets the whole."""
        deliver(part)
        if self.learner and isinstance(part, Delta) and part.ending:
            self.learner.add(job.prompt, job.token_ids)

    def warm_up(
        self, most_tokens: int, groups: Sequence[Group] = LIKELY, *, wait: bool = True
    ) -> None:
        """Compile the programs for texts of up to this many tokens while no request is answered.

        Programs for small caches are compiled first; of one cache size, those for few rows and the first groups.

        Args:
          wait: return only when all programs are compiled.
        """
        slot_sizes = self._scheduler.slot_sizes(most_tokens)
        plan: list[tuple[int, int, Planned]]
        plan = [(n, len(groups), ScoringPrograms(n)) for n in slot_sizes]
        plan += [
            (n, i + j, Programs(group, rows, n))
            for n in slot_sizes
            for j, rows in enumerate(sorted(self._trees))
            for i, group in enumerate(groups)
        ]
        self._compiler.plan(programs for *_, programs in sorted(plan, key=lambda p: p[:2]))
        if wait:
            self._compiler.wait()

    def prepare(self, then: Callable[[], None]) -> None:
        """Compile the programs of a first request before all others; `then` is called after that, in a thread."""
        self._compiler.queue(self._first)

        def wait() -> None:
            self._compiler.wait(self._first)
            then()

        threading.Thread(target=wait, name="preparing", daemon=True).start()

    def when_failed(self, callback: Callable[[], None]) -> None:
        """Call `callback`, in the server's thread, if errors end the server."""
        with self._wake:
            self._when_failed = callback
        if self.failed:
            callback()

    def close(self) -> None:
        """Refuse new requests, answer the submitted ones, and end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        if self.learner:
            self.learner.close()
        self._compiler.close()
        self._threads.close()

    def _notify(self) -> None:
        with self._wake:
            self._changed = True
            self._wake.notify()

    def _serve(self) -> None:
        try:
            busy = False
            while self._wait(busy):
                busy = self._turn()
        except BaseException as error:  # report any error to every client
            with self._wake:
                self._error = error
                self._take_inbox()
            log(f"error: decoding ended: {first_line(error)}")
            self._scheduler.fail(Stopped(f"decoding ended: {error}"))
            self._when_failed()
            if not isinstance(error, Exception):
                raise

    def _take_inbox(self) -> bool:
        arrived = bool(self._inbox)
        while self._inbox:
            self._scheduler.add(self._inbox.pop(0))
        return arrived

    def _wait(self, busy: bool) -> bool:
        """Block until work arrives; False once the server is closed.

        Args:
          busy: the last turn left work.
        """
        with self._wake:
            while not (self._take_inbox() or self._changed or busy):
                if self._closing and not (self.busy or self._queued):
                    return False
                self._compiler.look_again()
                self._wake.wait()
            self._changed = False
        return True

    def _turn(self) -> bool:
        """Take a turn. An error loses the requests on the device; queued ones continue.

        Raises:
          Exception: too many consecutive errors.
        """
        try:
            busy = self._scheduler.step()
        except Exception as error:
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                raise
            log(f"warning: a step failed, its requests are lost: {first_line(error)}")
            self._scheduler.restart(Stopped(f"a step failed: {first_line(error)}"))
            return True
        if self._scheduler.chunks > self._chunks:
            self._chunks, self._failures = self._scheduler.chunks, 0
        if self._compiler.failures >= MOST_FAILURES:
            raise RuntimeError("no program can be compiled")
        return busy
