"""The standard streams: messages on stderr, results on stdout, and streams that are closed or full."""

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

# Messages of the blocks of `messages_after` that run.
held: list[list[str]] = []


@contextmanager
def messages_after() -> Iterator[None]:
    """Print the messages of this block, of any thread, after it: a line of text is open meanwhile."""
    held.append([])
    try:
        yield
    finally:
        for line in held.pop():
            inform(line)


def inform(line: str) -> None:
    """Print a message for the user to stderr, apart from the program's result on stdout.

    A message that cannot be printed is dropped.
    """
    if held:
        held[-1].append(line)
        return
    try:
        if sys.stderr is not None:  # print() takes None for stdout
            print(line, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def log(line: str) -> None:
    """Print a line of a server's log: a message with the time of day, cut to its first line."""
    inform(f"{time.strftime('%H:%M:%S')} {line.partition(chr(10))[0]}")


def print_json(
    record: Mapping[str, object], write: Callable[[str], object] = print
) -> None:
    """Print one JSON object per line, with non-ASCII characters escaped unless stdout is UTF-8."""
    utf8 = "utf" in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    write(json.dumps(record, ensure_ascii=not utf8))


def open_standard_streams() -> None:
    """Make closed standard streams safe, and let any encoding print any text.

    The descriptor of a closed stream is opened on the null device, so that no later file gets its number. Reading
    that input or writing that output fails (EBADF); messages are dropped. Characters that the encoding of
    stdout lacks are escaped, as on stderr.
    """
    modes = {"stdin": ("r", os.O_WRONLY), "stdout": ("w", os.O_RDONLY), "stderr": ("w", os.O_WRONLY)}  # fmt: skip
    for fd, (name, (mode, flags)) in enumerate(modes.items()):
        if getattr(sys, name) is None:
            os.open(os.devnull, flags)  # gets the lowest free number, which is fd
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, or Python reports an error when it flushes it at exit."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except OSError:  # a stream without a descriptor, as in a notebook
        pass


def announced(what: str, after: float = 2.0) -> AbstractContextManager[None]:
    """Print "`what` ..." if the block takes longer than `after` seconds."""
    return call_if_longer(after, lambda: inform(f"{what} ..."))


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print "`what`: 1.2 s" if the block took over a second and succeeded."""
    began = time.perf_counter()
    yield
    if (seconds := time.perf_counter() - began) > 1:
        inform(f"{what}: {seconds:.1f} s")


@contextmanager
def call_if_longer(seconds: float, callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` on another thread if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, callback)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
