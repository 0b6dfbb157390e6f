"""Errors whose message is meant for the user: one clear sentence, exit status 2."""

import difflib
import errno
import importlib.util
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

# A file that cannot be written further: a full disk or quota, a failed device.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# Signals that end a command, and their names for messages.
STOPS: dict[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class UserError(Exception):
    """Bad input. Entry points print the message alone (no traceback) and exit with 2."""


class Terminated(SystemExit):
    """SIGTERM, raised where Ctrl-C would raise `KeyboardInterrupt`."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def stop_signal(error: BaseException | None) -> int:
    """The number of the signal that raised an error, 0 for other errors."""
    if isinstance(error, Terminated):
        return signal.SIGTERM
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0


@contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Turn any error of the tokenizers library, which is a BaseException if its Rust code panics, into a UserError."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{problem}: {first_line(error)}") from error


def did_you_mean(
    name: object, known: Iterable[str], aliases: Mapping[str, str] | None = None
) -> str:
    """The end of a message about an unknown name: "; did you mean 'medusa'?", or "".

    Args:
      known: the names that exist.
      aliases: other projects' names, and the ones here; those of unknown names are ignored.
    """
    word, names = str(name), list(known)
    near = (aliases or {}).get(word, "")
    near = near if near in names else nearest(word, names)
    return f"; did you mean {near!r}?" if near else ""


def one_of(
    what: str, value: object, known: Iterable[str], aliases: Mapping[str, str] | None = None
) -> None:
    """Raise a `UserError` with the known names if `value` is none of them."""
    if value not in (names := [*known]):
        listed = ", ".join(name or "empty" for name in names)
        near = did_you_mean(value, names, aliases)
        raise UserError(f"{what} is one of {listed}, not {repr(value)[:80]}{near}")


def between(what: str, value: float, least: float, most: float) -> None:
    """Raise a `UserError` for a number outside [least, most], NaN included."""
    if not least <= value <= most:
        raise UserError(f"{what} is from {least} to {most}, not {value}")


def differences(found: object, wanted: object) -> str:
    """Fields of both configurations that differ, values cut: "n_layers is 1, not 2; rank is 8, not 4"."""
    values = [(x, a, vars(wanted).get(x, a)) for x, a in vars(found).items()]
    return "; ".join(f"{x} is {a!r:.80}, not {b!r:.80}" for x, a, b in values if a != b)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known name that is spelled most like `word`, "" if none is close."""
    plain = {_plain(name): name for name in known}
    found = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=0.6)
    return plain[found[0]] if found else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def first_line(error: BaseException) -> str:
    """The first line of an error message, cut to 200 characters; without a message the error's name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def one_line(error: Exception) -> str:
    """The message for an error that is not a bug, "" for any other."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and (error.filename or error.errno in UNWRITABLE):
        return f"{error.filename or 'cannot write'}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in ("", "medusa_jax") or importlib.util.find_spec(package):
            return ""
        return (
            f"medusa_jax needs {package}, which this Python ({sys.executable}) does not "
            "have: activate the environment it is installed in (. .venv/bin/activate), or run "
            "pip install medusa-jax (in a clone: pip install -e .)"
        )
    if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError):
        first = (str(error).splitlines() or ["out of memory"])[0]
        return (
            f"out of device memory ({first}); use a smaller batch (in training "
            "train.accumulation or data.seq_len), a narrower dtype or a mesh over more devices"
        )
    return ""
