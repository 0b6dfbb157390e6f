"""Compile for a call: first what reads its prompts, then its steps."""

import time
from collections.abc import Iterable
from itertools import islice


class Compiling:
    """Compiles the programs of a call when they are needed.

    Args:
      stages: compiles for the prompts before the first value, for the steps before the second; no values if all is compiled.

    Attributes:
      seconds: spent so far.
    """

    def __init__(self, stages: Iterable[None] = ()) -> None:
        self._stages = iter(stages)
        self.seconds = 0.0

    def prompts(self) -> bool:
        """Compile what reads the prompts; False if all was compiled already."""
        return self._compile(1)

    def steps(self) -> bool:
        """Compile the rest; False if nothing was left."""
        return self._compile(None)

    def _compile(self, n_stages: int | None) -> bool:
        start = time.perf_counter()
        if worked := bool(list(islice(self._stages, n_stages))):
            self.seconds += time.perf_counter() - start
        return worked
