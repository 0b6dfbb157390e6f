"""What entry points share: one-line errors, notes about slow things, the compilation cache."""

import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from medusa_jax.errors import UserError


def inform(line: str) -> None:
    """A line for the person at the terminal, beside what the program prints as its result."""
    print(line, file=sys.stderr, flush=True)


def announced(what: str, after: float = 2.0) -> AbstractContextManager[None]:
    """Says "`what` ..." if the block takes longer than `after` seconds."""
    return overtime(after, lambda: inform(f"{what} ..."))


@contextmanager
def overtime(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Acts, on a thread of its own, if the block takes longer than so many seconds."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def cache_directory(name: str) -> str:
    """Where this project keeps files of one kind between runs, for this user."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(
        os.path.expanduser("~"), ".cache"
    )
    return os.path.join(root, "medusa_jax", name)


def instruction_limit() -> str:
    """The instruction set beyond which XLA must not go on this CPU, such as "AVX2"; "" without one."""
    limits = re.findall(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    return limits[-1].upper() if limits else ""


def processor() -> str:
    """What tells processors apart that one home directory may serve."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    marks = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "\n".join(sorted(marks | {instruction_limit()} - {""}))


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, unless the user has set a place of their own."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", cache_directory("compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)


def warn_if_accelerator_unused() -> None:
    """A GPU or TPU is present but JAX computes on the CPU: common in fresh notebooks."""
    import jax

    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return
    if os.path.exists("/dev/nvidia0"):
        inform(
            "warning: this machine has a GPU but JAX uses the CPU: pip install 'jax[cuda12]'"
        )
    elif os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0"):
        inform(
            "warning: this machine has a TPU but JAX uses the CPU: pip install 'jax[tpu]'"
        )


def run_main(main: Callable[[], int]) -> int:
    """Run an entry point; bad input, files that cannot be used and lack of memory become one line
    and exit status 2."""
    try:
        return main()
    except UserError as error:
        inform(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        inform(f"error: {error.filename}: {error.strerror}")
        return 2
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, MemoryError):
            raise
        first = (str(error).splitlines() or ["out of memory"])[0]
        inform(
            f"error: out of device memory ({first}); use a smaller --dtype, batch, "
            "context or tree, or a --mesh over more devices"
        )
        return 2
