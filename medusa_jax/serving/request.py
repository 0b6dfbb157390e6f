"""What a client asks of a server, and what it gets back while the answer grows."""

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from medusa_jax.api import Options, Result
from medusa_jax.errors import UserError


@dataclass(frozen=True)
class Request:
    """One text to write.

    Attributes:
      prompt: text or token ids.
      options: how it is decoded.
      id: decides every random draw together with the seed, as in `Model.generate`.
      drafts: False decodes plainly; the text is the same.
      acceptance: a rule of `decoding/acceptance`, or "auto".
      stop_ids: tokens that end the text and are cut off it, like stop strings.
      min_tokens: EOS, stop strings and `stop_ids` end the text after this many new tokens only.
    """

    prompt: str | Sequence[int]
    options: Options = field(default_factory=Options)
    id: int = 0
    drafts: bool = True
    acceptance: str = "auto"
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


@dataclass(frozen=True)
class Ending:
    """How an answer ended.

    Attributes:
      result: the whole answer; its seconds are those of this request alone, and others ran
        next to it.
      waited_seconds: from `submit` until its prompt began to be read.
      reused_tokens: prompt tokens that were not computed again.
      tree_nodes: of the tree that it was last decoded with; 1 is plain decoding.
    """

    result: Result
    waited_seconds: float
    reused_tokens: int
    tree_nodes: int

    @property
    def accepted_drafts(self) -> int:
        """Its tokens that were drafted."""
        return sum(depth > 0 for depth in self.result.draft_depths)

    @property
    def drafted(self) -> int:
        """Tokens that were drafted for it, as if its last tree had been that of all steps."""
        return self.result.steps * (self.tree_nodes - 1)


@dataclass(frozen=True)
class Delta:
    """What is new of an answer.

    Attributes:
      text: may be shown now.
      parts: the same in pairs of text and draft depth (0: the backbone's own).
      token_ids: the new tokens, whose text may still be held back.
      logprobs, top_logprobs: of these, as in `Result`, if they were asked for.
      ending: only in the last one.
    """

    text: str
    parts: list[tuple[str, int]]
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    ending: Ending | None = None


class TooLong(UserError):
    """The prompt has more tokens than the server takes."""


class Stopped(Exception):
    """The server ended before the answer did."""


class TooCostly(Stopped):
    """The constraint of the answer met a limit before its end."""


# Told every delta of an answer, and an exception if there will be no more; in the server's thread.
Deliver = Callable[[Delta | Stopped], None]


class Handle:
    """A request that was submitted: iterate over its deltas, or cancel it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._deltas: queue.SimpleQueue[Delta | Stopped] = queue.SimpleQueue()
        self.cancelled = False

    def cancel(self) -> None:
        """The rest is not wanted: its slot is free after the chunk of steps that is on its way."""
        self.cancelled = True
        self._wake()

    def deliver(self, delta: Delta | Stopped) -> None:
        """Where deltas go unless `submit` got another place."""
        self._deltas.put(delta)

    def __iter__(self) -> Iterator[Delta]:
        """The deltas as they come; the last has an ending.

        Raises:
          Stopped: the server ended first.
        """
        while True:
            delta = self._deltas.get()
            if isinstance(delta, Stopped):
                raise delta
            yield delta
            if delta.ending:
                return
