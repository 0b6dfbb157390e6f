"""This machine: its processor, its accelerator, and how its memory is returned."""

import os
import platform
import re
import sys
from pathlib import Path

from medusa_jax.console import inform


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


def accelerator() -> str:
    """The extra of JAX for this machine's accelerator, "cuda12" or "tpu"; "" without one. Does not start JAX."""
    files = {"/dev/nvidia0": "cuda12", "/dev/accel0": "tpu", "/dev/vfio/0": "tpu"}
    return next((extra for file, extra in files.items() if os.path.exists(file)), "")


def warn_if_accelerator_unused() -> None:
    """Warn if a GPU or TPU is present but JAX uses the CPU, common in new notebooks."""
    import jax

    extra = accelerator()
    if extra and jax.default_backend() == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        inform(f"warning: JAX uses the CPU, not the GPU or TPU: pip install 'jax[{extra}]'")


def give_memory_back() -> None:
    """Have glibc return freed memory to the system: by default each compiling thread keeps a heap.

    Saves 40 MB of the demo's 307 MB.
    """
    # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    _set_malloc((-8, 1), (-3, 2**17), (-1, 2**17))


def keep_memory() -> None:
    """Have glibc keep freed memory, for training on a CPU.

    XLA allocates buffers of a program's whole temporary memory at every call, and by default each of their pages is
    mapped anew, which takes a fifth of a step.
    """
    _set_malloc((-4, 0), (-1, -1))  # M_MMAP_MAX, M_TRIM_THRESHOLD


def _set_malloc(*options: tuple[int, int]) -> None:
    """Set options of glibc's `mallopt`, where the C library has it."""
    if sys.platform.startswith("linux"):
        import ctypes

        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
        for option in options:
            mallopt(*option)
