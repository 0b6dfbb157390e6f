"""Progress bars with the time left."""

import time

from tqdm import tqdm

from medusa_jax.console import inform

# Least seconds between two lines without a terminal.
LINES = 10.0


class ProgressBar(tqdm):
    """A bar with the time left at a terminal, elsewhere a line now and then.

    with ProgressBar("timing trees", 160, "run") as bar:
        bar.update()   # timing trees: 40 of 160 runs, 2 minutes left
    """

    def __init__(
        self, what: str, total: int, unit: str, done: int = 0, shown: bool = True
    ) -> None:
        """Begin; `done` of `total` were done before. With `shown` false nothing is printed."""
        self.what, self.noun, self.before, self.done, self.note = what, unit, done, done, ""
        self.began = self.told = time.perf_counter()
        self.shown = shown
        super().__init__(
            total=total, initial=done, desc=what, unit=unit, disable=None if shown else True
        )

    def update(self, n: float | None = 1, note: str | None = None) -> bool | None:
        """Count `n` more; `note`, such as a speed, is shown with all further progress."""
        self.done += int(n or 0)
        self.note = self.note if note is None else note
        now = time.perf_counter()
        if not self.disable and note is not None:
            self.set_postfix_str(note)
        elif self.disable and self.shown and now - self.told > LINES:
            self.told = now
            inform(self._line(now - self.began))
        return super().update(n)

    def _line(self, seconds: float) -> str:
        parts = [f"{self.what}: {self.done} of {self.total} {self.noun}s"]
        parts += [self.note] if self.note else []
        if new := self.done - self.before:
            left = seconds * (self.total - self.done) / new
            parts.append(
                f"{left / 60:.0f} minutes left" if left > 90 else f"{left:.0f} seconds left"
            )
        return ", ".join(parts)
