"""Compile the kernels and register them with XLA.

A wheel fits many machines, and XLA's interface belongs to the installed jaxlib. Therefore the
first decoding process on a machine with a C++ compiler compiles the kernels for its processor (a few
seconds) and stores them in the user's cache directory. Without a compiler, XLA's own operations
are used, with the same features.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
from jax.typing import DTypeLike

from medusa_jax.cache_directories import cache_directory
from medusa_jax.console import announced
from medusa_jax.devices.machine import instruction_limit, processor
from medusa_jax.errors import UserError
from medusa_jax.programs import read_ahead

VARIABLE = "MEDUSA_JAX_PRODUCTS"
SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off")
HANDLERS = tuple(
    f"medusa_{name}" for name in ("product", "rows", "layer", "commit", "norm", "rotate")
)
# Flags for this processor, to be tried in this order: compilers for x86, for both, for ARM.
MACHINE = (
    ("-march=native", "-mprefer-vector-width=512"),
    ("-march=native",),
    ("-mcpu=native",),
)
# Flags for XLA's limits on instructions: the kernels obey the same limit as its programs.
LIMITED = {
    "SSE4_2": "-march=x86-64-v2",
    "AVX": "-march=sandybridge",
    "AVX2": "-march=x86-64-v3",
    "AVX512": "-march=x86-64-v4",
}


class Library(ctypes.CDLL):
    """The compiled kernels, registered with XLA by name; `panel`: outputs of a panel of floats."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = str(path)
        self.panel = self.call("medusa_panel_width")
        for name in HANDLERS:
            handler = jax.ffi.pycapsule(getattr(self, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")

    def call(self, name: str, *numbers: int) -> int:
        """Call a function that takes integers and addresses; returns its integer."""
        function = getattr(self, name)
        function.restype = ctypes.c_int64
        return int(function(*map(ctypes.c_int64, numbers)))


@functools.cache
def library() -> Library | None:
    """The kernels for this machine, compiled on first use; None if that fails."""
    try:
        path = _compiled()
        native = Library(path) if path else None
        read_ahead()  # these programs call the kernels
        return native
    except OSError:  # the cache is not writable, or the system cannot load the file
        return None


def loaded() -> Library:
    """The kernels, for callers that know that they exist."""
    native = library()
    assert native is not None
    return native


def usable(dtype: DTypeLike) -> bool:
    """Whether the kernels compute in this type here, and `MEDUSA_JAX_PRODUCTS` allows them.

    Raises:
      UserError: an unknown value of the variable, or "native" where they cannot be compiled.
    """
    setting = os.environ.get(VARIABLE, "")
    if setting not in ("", "native", "plain"):
        raise UserError(f"{VARIABLE} is plain or native, not {setting!r}")
    if setting == "plain" or jnp.dtype(dtype).name not in ("float32", "bfloat16"):
        return False
    if library() is None and setting == "native":
        raise UserError(
            f"{VARIABLE}=native needs a C++ compiler (c++, or what CXX names) that can build "
            "the kernels for this processor"
        )
    return library() is not None


def panel() -> int:
    """Outputs of a panel of floats (`Storage.panel`)."""
    return loaded().panel


def attends(head_dim: int) -> bool:
    """Whether `layer` takes heads of this size: whole vectors."""
    native = library()
    return native is not None and bool(native.call("medusa_attends", head_dim))


def mark() -> str:
    """The name of the compiled file, by its sources, compiler and content."""
    return Path(loaded().path).name


def _compiled() -> Path | None:
    """Path of the shared object in the cache directory; compiles it if it is missing or damaged.

    Its name contains checksums of its sources, its compiler and its content: loading a truncated
    file would end the process (SIGBUS). Without a compiler, a file from any compiler is used.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    compiler = compiler or shutil.which("clang++")
    try:
        shlex.split(compiler or "")
    except ValueError as error:
        raise UserError(f"CXX is no command: {error} in {compiler!r}") from error
    limit = instruction_limit()
    machines = ((LIMITED[limit],),) if limit in LIMITED else MACHINE
    marks = [jaxlib.__version__, platform.machine(), processor(), str((FLAGS, machines))]
    sources = sorted(SOURCES.glob("*.cc")) + sorted(SOURCES.glob("*.h"))
    made_from = _digest("\n".join(marks).encode(), *(s.read_bytes() for s in sources))
    made_by = _digest(_version(compiler)) if compiler else "*"
    directory, stem = Path(cache_directory("native")), f"kernels-{made_from}-{made_by}-"
    for path in sorted(directory.glob(f"{stem}*.so")):
        mine = not path.stat().st_mode & 0o022
        if mine and path.stem.endswith(f"-{_digest(path.read_bytes())}"):
            return path
        path.unlink(missing_ok=True)
    if compiler is None:
        return None
    with (
        announced("compiling kernels for this processor, once"),
        tempfile.TemporaryDirectory(dir=directory) as scratch,
    ):
        output = Path(scratch) / "kernels.so"
        for machine in machines:
            if _build([*shlex.split(compiler), *FLAGS, *machine], output):
                path = directory / f"{stem}{_digest(output.read_bytes())}.so"
                output.chmod(0o700)
                output.replace(path)  # atomic: another process may be reading
                return path
    return None


def _build(command: list[str], output: Path) -> bool:
    """Compile all sources in parallel and link them; returns whether that succeeded."""
    units = [(str(s), str(output.with_name(f"{s.stem}.o"))) for s in SOURCES.glob("*.cc")]
    processes = [
        subprocess.Popen(
            [*command, "-isystem", jax.ffi.include_dir(), "-c", source, "-o", unit],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for source, unit in units
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        return False
    link = [*command, "-shared", *(unit for _, unit in units), "-o", str(output)]
    return subprocess.run(link, capture_output=True).returncode == 0


def _version(compiler: str) -> bytes:
    """A compiler's command and its output for --version."""
    command = [*shlex.split(compiler), "--version"]
    return compiler.encode() + subprocess.run(command, capture_output=True).stdout


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
