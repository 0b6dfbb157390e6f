"""Progress of long work: a count, a rate and the time left; where it stopped."""

import threading
import time
from types import TracebackType

from tqdm import tqdm

from medusa_jax.console import inform
from medusa_jax.errors import STOPS, stop_signal

# Without a terminal: seconds between two lines, and later their share of the time so far.
LINES, SHARE = 10.0, 0.03


class ProgressBar(tqdm):
    """A bar at a terminal, elsewhere a line now and then, even while nothing ends.

    with ProgressBar("timing trees", 160, "run") as bar:
        bar.update()   # timing trees: 40 of 160 runs, 3.0 s each, 6 minutes left
    """

    def __init__(
        self, what: str, total: int, unit: str, done: int = 0, shown: bool = True
    ) -> None:
        """Begin; `done` of `total` were done before. With `shown` false nothing is printed."""
        self.what, self.noun, self.before, self.done, self.note = what, unit, done, done, ""
        self.unfinished = 0.0  # work done on units that have not ended, in units
        self.began = self.told = time.perf_counter()
        self.shown, self.ended = shown, threading.Event()
        if done and shown:
            inform(f"{what}: {done} of {total} {unit}s were done before")
        super().__init__(
            total=total, initial=done, desc=what, unit=unit, disable=None if shown else True
        )
        if shown:
            threading.Thread(target=self._keep_telling, daemon=True).start()

    def update(self, n: float | None = 1, note: str | None = None) -> bool | None:
        """Count `n` more; `note`, such as a speed, is shown with all further progress."""
        self.done += int(n or 0)
        self.note = self.note if note is None else note
        if not self.disable and note is not None:
            self.set_postfix_str(note)
        self._tell()
        return super().update(n)

    def close(self) -> None:
        self.ended.set()
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        """End; if a signal ended the block, say after how much."""
        self.close()
        if error and self.shown and (number := stop_signal(error)):
            error.add_note(
                f"{self.what}: stopped by {STOPS[number]} after {self.done} of {self.total} {self.noun}s"
            )

    def _keep_telling(self) -> None:
        while not self.ended.wait(max(LINES, 1.0)):
            if self.disable:
                self._tell()
            else:
                self.refresh()

    def _tell(self) -> None:
        now = time.perf_counter()
        pause = max(LINES, SHARE * (now - self.began))
        if self.disable and self.shown and now - self.told > pause:
            self.told = now
            inform(self._line(now - self.began))

    def _line(self, seconds: float) -> str:
        new = self.done - self.before
        parts = [f"{self.what}: {self.done} of {self.total} {self.noun}s"]
        if self.note or new:
            parts.append(self.note or _each(seconds / new))
        if work := new + self.unfinished:
            parts.append(
                f"{duration(seconds * max(self.total - self.before - work, 0) / work)} left"
            )
        else:
            parts.append(f"{duration(seconds)} so far")
        return ", ".join(parts)


def _each(seconds: float) -> str:
    return f"{seconds:.1f} s each" if seconds >= 1 else f"{1 / seconds:.1f} a second"


def duration(seconds: float) -> str:
    """A time for people: "44 seconds", "5 minutes"."""
    return f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"
