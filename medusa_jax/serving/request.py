"""A client's request, and the parts of its answer."""

import math
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_jax.api import Options, Result
from medusa_jax.errors import UserError
from medusa_jax.typed import checked_arguments, read_fields

# Most alternatives of a token whose log-probabilities a request may ask for.
MOST_BEST = 20
Limits = dict[str, tuple[Callable[[Any], bool], str]]
# By field of a request and of its lines: a test of its value, and the description of allowed values.
LIMITS: Limits = {
    "options": (lambda _: True, "Options"),
    "id": (lambda _: True, "a whole number"),
    "drafts": (lambda _: True, "True or False"),
    "acceptance": (lambda _: True, "the name of a rule"),
    "stop_ids": (lambda ids: min(ids, default=0) >= 0, "token ids, 0 or more"),
    "min_tokens": (lambda n: 0 <= n < 2**31, "a whole number, 0 to 2**31 - 1"),
    "predicted": (lambda ids: min(ids, default=0) >= 0, "token ids, 0 or more"),
    "lines": (lambda _: True, "Lines or None"),
}
LINES: Limits = {
    "indent": (lambda n: n >= 0, "a whole number, at least 0"),
    "seconds": (lambda seconds: seconds > 0, "a positive number"),
}


@dataclass(frozen=True)
class Lines:
    """Where the lines of a completion end it.

    Attributes:
      indent: the text ends before a line with fewer spaces and tabs at its beginning.
      seconds: the text ends at a line's end this long after its first token.
    """

    indent: int = 0
    seconds: float = math.inf

    def __post_init__(self) -> None:
        read_fields(self, LINES)


@dataclass(frozen=True)
class Request:
    """One text to write.

    Attributes:
      prompt: text or token ids.
      options: decoding options.
      id: determines every random draw together with the seed, as in `Model.generate`.
      drafts: False decodes without drafts; the text is the same.
      acceptance: a rule of `decoding/acceptance`, or "auto".
      stop_ids: tokens that end the text and are cut off, like stop strings.
      min_tokens: EOS, stop strings and `stop_ids` end the text only after this many new tokens.
      predicted: tokens that are expected in the text, to copy drafts from; the text is the same.
      lines: rules of a completion in an editor.
    """

    prompt: str | Sequence[int]
    options: Options = field(default_factory=Options)
    id: int = 0
    drafts: bool = True
    acceptance: str = "auto"
    stop_ids: Sequence[int] = ()
    min_tokens: int = 0
    predicted: Sequence[int] = ()
    lines: Lines | None = None

    def __post_init__(self) -> None:
        read_fields(self, LIMITS)


Request.__init__ = checked_arguments(types=False)(Request.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True)
class Ending:
    """The end of an answer.

    Attributes:
      result: the whole answer; its times include steps of other requests.
      waited_seconds: from the request's arrival until reading its prompt began.
      reused_tokens: prompt tokens taken from a row's cache.
      drafts: how many drafts each step verified; steps that the device took after the text's end may follow.
    """

    result: Result
    waited_seconds: float
    reused_tokens: int
    drafts: Sequence[int] = ()

    @property
    def tree_nodes(self) -> int:
        """Nodes of the last step's tree; 1 is plain decoding."""
        return self.drafts[-1] + 1 if self.drafts else 1

    @property
    def accepted_drafts(self) -> int:
        """Number of accepted drafts among its tokens."""
        return sum(depth != 0 for depth in self.result.draft_depths)

    @property
    def drafted(self) -> int:
        """Number of verified drafts."""
        return sum(self.drafts[: self.result.steps])

    @property
    def accepted_by_step(self) -> list[int]:
        """Accepted drafts of each step that verified drafts. The last step may have ended before its bonus token."""
        depths, lengths = self.result.draft_depths, self.result.accepted_lengths
        accepted = [n - 1 for n in lengths]
        if accepted and depths[-1]:
            accepted[-1] += 1
        return [n for n, drafts in zip(accepted, self.drafts) if drafts]


@dataclass(frozen=True)
class Delta:
    """A new part of an answer.

    Attributes:
      parts: new text that may be shown, in pairs of text and draft depth (0: the backbone's own).
      token_ids: the new tokens; their text may still be held back.
      logprobs, top_logprobs: of these tokens, as in `Result`, if requested; None for the first token of an echo.
      ending: only in the last part.
    """

    parts: list[tuple[str, int]]
    token_ids: list[int]
    logprobs: Sequence[float | None]
    top_logprobs: Sequence[list[tuple[int, float]] | None]
    ending: Ending | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


class TooLong(UserError):
    """The prompt has more tokens than the server takes."""


class Busy(Exception):
    """The queue is full: try again later."""


class Stopped(Exception):
    """The answer broke off, or never began."""


class TooCostly(Stopped):
    """The answer's constraint exceeded a limit before the answer ended."""


class NoScores(Stopped):
    """No token can follow the answer's text (`NO_SCORES`)."""


# Called in the server's thread with every delta of an answer, and with an exception if no more will come.
Deliver = Callable[[Delta | Stopped], None]


class Handle:
    """A submitted request: iterate over its deltas, or cancel it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._deltas: queue.SimpleQueue[Delta | Stopped] = queue.SimpleQueue()
        self.cancelled = False

    def cancel(self) -> None:
        """Cancel the rest; the slot is free after the current chunk."""
        self.cancelled = True
        self._wake()

    def deliver(self, delta: Delta | Stopped) -> None:
        """Queue a delta for the iterator; the default of `submit`."""
        self._deltas.put(delta)

    def __iter__(self) -> Iterator[Delta]:
        """Yield the deltas as they come; the last has an ending.

        Raises:
          Stopped: the answer broke off.
        """
        while True:
            delta = self._deltas.get()
            if isinstance(delta, Stopped):
                raise delta
            yield delta
            if delta.ending:
                return
