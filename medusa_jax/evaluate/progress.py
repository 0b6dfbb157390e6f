"""How far a measurement is, and how long it still takes."""

import time
from typing import Any

from tqdm import tqdm

from medusa_jax.console import inform

# Seconds between two lines where there is no terminal.
LINES = 10.0


class Progress(tqdm):
    """A bar with the time left at a terminal, elsewhere a line now and then.

    with Progress("timing trees", 160, "run") as bar:
        bar.update()   # timing trees: 40 of 160 runs, 2 minutes left
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        """Begin; `total` counts what `update` is called for."""
        self.what, self.whole, self.noun, self.done = what, total, unit, 0
        self.began = self.told = time.perf_counter()
        super().__init__(total=total, desc=what, unit=unit, disable=None)

    def update(self, n: float | None = 1) -> Any:
        """`n` more are done."""
        self.done += int(n or 0)
        now = time.perf_counter()
        if self.disable and self.done and now - self.told > LINES:
            self.told = now
            left = (now - self.began) * (self.whole - self.done) / self.done
            time_left = f"{left / 60:.0f} minutes" if left > 90 else f"{left:.0f} seconds"
            inform(
                f"{self.what}: {self.done} of {self.whole} {self.noun}s, {time_left} left"
            )
        return super().update(n)
