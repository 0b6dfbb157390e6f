"""The call of an entry point: errors of the user are one line, with exit status 2; how a command is stopped."""

import atexit
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from medusa_jax.console import discard, inform, open_standard_streams
from medusa_jax.errors import STOPS, Terminated, one_line, stop_signal


def run_main(main: Callable[[], int], again: str = "") -> int:
    """Run an entry point; errors of the user, files, packages or memory are one line and status 2.

    SIGTERM and Ctrl-C end it at once, with status 128 + their number.

    Args:
      again: the command line that resumes, for a command that keeps finished work.
    """
    open_standard_streams()
    # Python's garbage collector by default takes a quarter of the imports' time, and runs again at exit.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    try:
        try:
            with sigterm_raises():
                return main()
        finally:
            sys.stdout.flush()  # here, where a failure is still handled
    except (KeyboardInterrupt, Terminated) as stop:
        number = stop_signal(stop)
        # Progress bars add after how much.
        inform("\n".join(getattr(stop, "__notes__", [f"stopped by {STOPS[number]}"])))
        if again:
            inform(f"finished work is kept; to go on: {again}")
        return 128 + number
    except BrokenPipeError:
        discard(sys.stdout)
        return 0
    except Exception as error:
        line = one_line(error)
        if not line:
            raise
        if isinstance(error, OSError) and error.filename is None:
            discard(sys.stdout)
        inform(f"error: {line}")
        return 2


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, once; with several processes JAX handles it instead."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
