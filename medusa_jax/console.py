"""Shared by entry points: one-line errors, messages about slow steps, the compilation cache."""

import atexit
import errno
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TextIO

from medusa_jax.errors import UserError

# A file that cannot be written further: a full disk or quota, a failed device.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def inform(line: str) -> None:
    """Print a message for the user to stderr, apart from the program's result on stdout.

    A message that cannot be printed is dropped.
    """
    try:
        if sys.stderr is not None:  # print() takes None for stdout
            print(line, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


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


def _discard(stream: TextIO) -> None:
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
def call_if_longer(seconds: float, callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` on another thread if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, callback)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def cache_directory(name: str) -> str:
    """The user's cache directory for one kind of files of this project; made, and closed to other users.

    Kernels and programs in it are run. Where the home directory has no place for it, it is under the directory
    of temporary files; where that is another user's, a new one of this process.
    """
    given, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    with suppress(OSError):
        root = os.path.join(given if os.path.isabs(given) else home, "medusa_jax")
        if os.path.isabs(root) and (path := _private(root, name)):
            return path
        shared = os.path.join(tempfile.gettempdir(), f"medusa_jax-{os.geteuid()}")
        return _private(shared, name) or _private(_scratch(), name)
    return os.path.join(os.devnull, name)  # no place: nothing is found or written


def _private(root: str, name: str) -> str:
    """A directory in `root`, made if it is missing and closed to others; "" if it cannot be this user's."""
    path = os.path.join(root, name)
    with suppress(OSError):
        for folder in (root, path):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if os.stat(folder).st_uid != os.geteuid():
                return ""
            os.chmod(folder, 0o700)
        return path
    return ""


@cache
def _scratch() -> str:
    path = tempfile.mkdtemp(prefix="medusa_jax-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def instruction_limit() -> str:
    """The newest instruction set that XLA may use on this CPU, such as "AVX2"; "" for any."""
    limits = re.findall(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    return limits[-1].upper() if limits else ""


def processor() -> str:
    """Identifies the processor type, for caches in a home directory shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    marks = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "\n".join(sorted(marks | {instruction_limit()} - {""}))


def use_compilation_cache() -> None:
    """Cache compiled programs on disk, unless the user has configured a directory."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", cache_directory("compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)


def accelerator() -> str:
    """The extra of JAX for this machine's accelerator, "cuda12" or "tpu"; "" without one. Does not start JAX."""
    files = {"/dev/nvidia0": "cuda12", "/dev/accel0": "tpu", "/dev/vfio/0": "tpu"}
    return next((extra for file, extra in files.items() if os.path.exists(file)), "")


def warn_if_accelerator_unused() -> None:
    """Warn if a GPU or TPU is present but JAX uses the CPU, common in new notebooks."""
    import jax

    found = accelerator()
    if found and jax.default_backend() == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        inform(f"warning: JAX uses the CPU, not the GPU or TPU: pip install 'jax[{found}]'")


def give_memory_back() -> None:
    """Have glibc return freed memory to the system: by default each compiling thread keeps a heap.

    Saves 40 MB of the demo's 307 MB.
    """
    if sys.platform.startswith("linux"):
        import ctypes

        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
        # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        for option, value in ((-8, 1), (-3, 2**17), (-1, 2**17)):
            mallopt(option, value)


def byte_size(n: float) -> str:
    """Bytes to read: 1_250_000_000 -> "1.2 GB", 34_500_000 -> "34.5 MB", 120 -> "0.1 kB"."""
    power = 3 if n >= 1e9 else 2 if n >= 1e6 else 1
    return f"{n / 1000**power:,.1f} {' kMG'[power]}B"


def entries(text: str) -> list[str]:
    """The entries of a list such as "a, b,": empty ones do not count."""
    return [part.strip() for part in text.split(",") if part.strip()]


def run_main(main: Callable[[], int]) -> int:
    """Run an entry point; turn bad input, unusable files, missing packages and lack of memory into one line
    and exit status 2."""
    open_standard_streams()
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()  # here, where a failure is still handled
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard(sys.stdout)
        return 0
    except Exception as error:
        line = one_line(error)
        if not line:
            raise
        if isinstance(error, OSError) and error.filename is None:
            _discard(sys.stdout)
        inform(f"error: {line}")
        return 2


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
