"""The programs of a call, compiled in two stages: those of its prompts, then those of its steps."""

import time
from collections.abc import Iterable


class Compiling:
    """Compiles the programs of a call when they are needed.

    Args:
      stages: compiles those of the prompts before it yields, and then those of the steps; nothing if all are compiled.

    Attributes:
      seconds: spent so far.
    """

    def __init__(self, stages: Iterable[None] = ()) -> None:
        self._stages = iter(stages)
        self.seconds = 0.0

    def prompts(self) -> bool:
        """Compile what reads the prompts; returns whether the steps are still to be compiled."""
        start = time.perf_counter()
        pending = next(self._stages, False) is None
        self.seconds += time.perf_counter() - start
        return pending

    def steps(self) -> float:
        """Compile the rest; returns the seconds of it."""
        start = time.perf_counter()
        for _ in self._stages:
            pass
        spent = time.perf_counter() - start
        self.seconds += spent
        return spent
