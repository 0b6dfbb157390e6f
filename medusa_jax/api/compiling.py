"""Compile for a call: first what reads its prompts, then its steps."""

import time
from collections.abc import Callable
from typing import TypeVar

Stage = Callable[[], None]
Result = TypeVar("Result")


class Compiling:
    """Compiles the programs of a call when they are needed.

    Args:
      warm_up: compiles for the prompts, and returns what compiles for the steps; None if all is compiled.
      done: called when all is compiled.

    Attributes:
      seconds: spent so far.
    """

    def __init__(
        self, warm_up: Callable[[], Stage] | None = None, done: Stage | None = None
    ) -> None:
        self._warm_up, self._done, self.seconds = warm_up, done, 0.0
        self._steps: Stage | None = None

    def prompts(self) -> bool:
        """Compile what reads the prompts; False if all is compiled."""
        if self._warm_up:
            self._steps = self._timed(self._warm_up)
            self._warm_up = None
        return self._steps is not None

    def steps(self) -> None:
        """Compile the rest."""
        self.prompts()
        if self._steps:
            self._timed(self._steps)
            self._steps = None  # frees its state
            if self._done:
                self._done()

    def _timed(self, stage: Callable[[], Result]) -> Result:
        start = time.perf_counter()
        result = stage()
        self.seconds += time.perf_counter() - start
        return result
