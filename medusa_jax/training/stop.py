"""Signals that end a run after its current step."""

import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

import jax

from medusa_jax import hosts
from medusa_jax.console import inform

# Signals and their names for messages.
STOPS: dict[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class StopRequest:
    """Handles SIGTERM and Ctrl-C while it is entered; a second Ctrl-C stops at once.

    Attributes:
      number: the signal that this process received, 0: none.
    """

    number = 0

    def __enter__(self) -> "StopRequest":
        self._before: dict[int, Any] = {}
        # Python allows handlers in the main thread only; with several processes JAX has its own.
        main = threading.current_thread() is threading.main_thread()
        if main and jax.process_count() == 1:
            self._before = {n: signal.signal(n, self._receive) for n in STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.number = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with suppress(RuntimeError):  # interrupted another print
                inform("finishing this step, then saving; Ctrl-C again stops at once")

    def after(self, step: int) -> bool:
        """Whether to stop after `step`; with several processes all of them must ask after each step."""
        return bool(self.number) or hosts.asked_to_stop(step)

    def report(self, step: int) -> int:
        """Tell the user that the run has stopped; returns the signal."""
        number = self.number or signal.SIGTERM  # JAX does not say which
        inform(
            f"stopped by {STOPS[number]} after step {step}; a checkpoint is saved, the same command "
            "resumes from there"
        )
        return int(number)
