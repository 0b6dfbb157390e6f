"""A model that answers many at a time: a queue, and a thread that takes the turns."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from medusa_jax.api import Model
from medusa_jax.errors import UserError
from medusa_jax.serving.job import Job, make_job
from medusa_jax.serving.request import Deliver, Handle, Request, Stopped
from medusa_jax.serving.scheduler import Scheduler
from medusa_jax.tree import Tree

_NO_MORE = object()


class Busy(Exception):
    """The queue is full: come again."""


def row_sizes(slots: int) -> list[int]:
    """Powers of two up to `slots`, and `slots`: a step costs what its rows cost, busy or not."""
    sizes = [1]
    while sizes[-1] < slots:
        sizes.append(min(2 * sizes[-1], slots))
    return sizes


class Server:
    """One model, many requests, each answered as if it were alone.

    Args:
      slots: requests that are answered at a time.
      trees: the numbers of rows to compile programs for, the largest is `slots`, and the tree
        for each; by default `row_sizes` and the model's own.
      queue: requests that may wait for a slot.
      max_prompt_tokens: most tokens of a prompt; by default what the context holds.
      max_new_tokens: most tokens of an answer; by default what the context holds.
      more: `chunk_steps` and `piece` of `Scheduler`.

    Example:
      with Server(model, slots=8) as server:
          for delta in server.submit(Request("def parse(", Options(max_new_tokens=50))):
              print(delta.text, end="")
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 8,
        trees: Mapping[int, Tree] | None = None,
        queue: int = 64,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
        **more: Any,
    ) -> None:
        if slots < 1 or queue < 1:
            raise UserError(f"slots and queue must be at least 1, not {slots} and {queue}")
        self.model = model
        self.queue = queue
        context = model.config.max_position
        self.most_prompt = min(max_prompt_tokens or context, context - 1)
        self.most_new = min(max_new_tokens or context, context)
        trees = trees or {rows: model.tree_at(rows) for rows in row_sizes(slots)}
        self._scheduler = Scheduler(model, trees=trees, most_new=self.most_new, **more)
        self._wake = threading.Condition()
        self._inbox: list[Job] = []
        self._closing = False
        self._parts: Iterator[None] | None = None  # of what is compiled ahead
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="decoding", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def slots(self) -> int:
        """Requests that are answered at a time."""
        return self._scheduler.slots

    @property
    def busy(self) -> int:
        """Slots that have a request."""
        return self._scheduler.busy

    @property
    def waiting(self) -> int:
        """Requests that have none yet."""
        return self._scheduler.waiting + len(self._inbox)

    @property
    def running(self) -> bool:
        """Whether requests are taken."""
        return not self._closing and self._error is None

    def submit(self, request: Request) -> Handle:
        """Have a request answered; iterate over the handle for its deltas.

        Raises:
          UserError: the model cannot answer it.
          Busy: too many are waiting.
          Stopped: the server is closed.
        """
        return self.submit_all([request])[0]

    def submit_all(
        self, requests: Sequence[Request], deliver: Sequence[Deliver] | None = None
    ) -> list[Handle]:
        """Several requests, or none of them if one is refused.

        Args:
          deliver: for each, whom its deltas are told instead of the handle.

        Raises:
          UserError, Busy, Stopped: as for `submit`.
        """
        handles = [Handle(self._notify) for _ in requests]
        jobs = [
            make_job(
                self.model,
                request,
                self.most_prompt,
                self.most_new,
                handle,
                deliver[i] if deliver else handle.deliver,
            )
            for i, (request, handle) in enumerate(zip(requests, handles))
        ]
        with self._wake:
            if not self.running:
                raise Stopped("the server is closed")
            if self.waiting + len(jobs) > self.queue:
                raise Busy(f"{self.waiting} requests are waiting already")
            self._inbox += jobs
            self._wake.notify()
        return handles

    def warm_up(
        self, most_tokens: int, groups: Sequence[tuple[bool, str]], *, wait: bool = True
    ) -> None:
        """Compile what texts of so many tokens need; before anything is submitted.

        Args:
          wait: until all is compiled. Else requests are taken meanwhile and a part is compiled
            whenever there is none: an early one may wait for the part in hand, and for what it needs
            and is not compiled yet.
        """
        parts = self._scheduler.warm_up(most_tokens, groups)
        if wait:
            for _ in parts:
                pass
            return
        with self._wake:
            self._parts = parts
            self._wake.notify()

    @property
    def warming_up(self) -> bool:
        """Whether something is still to be compiled ahead."""
        return self._parts is not None

    def close(self) -> None:
        """Answer what was submitted, take nothing new, and end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _serve(self) -> None:
        more = False
        try:
            while True:
                with self._wake:
                    while not (more or self._inbox or self._closing or self._parts):
                        self._wake.wait()
                    arrived, self._inbox = self._inbox, []
                    for job in arrived:
                        self._scheduler.add(job)
                if self._closing and not (more or arrived):
                    return
                if more or arrived:
                    more = self._scheduler.step()
                elif self._parts and next(self._parts, _NO_MORE) is _NO_MORE:
                    self._parts = None
        except BaseException as error:  # every client is told, whatever it was
            with self._wake:
                self._error = error
                for job in self._inbox:
                    self._scheduler.add(job)
                self._inbox = []
            self._scheduler.fail(Stopped(f"decoding ended: {error}"))
            raise
