"""Compiling the kernels and giving them to XLA.

Not at installation: a wheel is built for no machine in particular, and XLA's interface is that of
the jaxlib that is installed here. So the first decoding process on a machine that has a C++ compiler
compiles them for this processor (a few seconds) and keeps them in the user's cache directory.
Without a compiler everything works as it does with them, by XLA's own products.
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

from medusa_jax.console import announced, cache_directory, instruction_limit, processor
from medusa_jax.errors import UserError

VARIABLE = "MEDUSA_JAX_PRODUCTS"
SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off")
HANDLERS = tuple(
    f"medusa_{name}" for name in ("product", "rows", "layer", "commit", "norm", "rotate")
)
# For this processor, in the words of x86 compilers and of those for ARM; vectors as wide as it has.
MACHINE = (
    ("-march=native", "-mprefer-vector-width=512"),
    ("-march=native",),
    ("-mcpu=native",),
)
# XLA's limits on instructions, in the same words: one limit for its programs and for the kernels.
LIMITED = {
    "SSE4_2": "-march=x86-64-v2",
    "AVX": "-march=sandybridge",
    "AVX2": "-march=x86-64-v3",
    "AVX512": "-march=x86-64-v4",
}


class Library(ctypes.CDLL):
    """The compiled kernels, known to XLA under their names; `panel`: outputs of a panel of floats."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = str(path)
        self.panel = self.call("medusa_panel_width")
        for name in HANDLERS:
            handler = jax.ffi.pycapsule(getattr(self, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")

    def call(self, name: str, *numbers: int) -> int:
        """The result of one of its functions of whole numbers and addresses."""
        function = getattr(self, name)
        function.restype = ctypes.c_int64
        return int(function(*map(ctypes.c_int64, numbers)))


@functools.cache
def library() -> Library | None:
    """The kernels for this machine, compiled if they are not yet; None where that cannot be."""
    try:
        path = _compiled()
        return Library(path) if path else None
    except OSError:  # no place to write, or a file that this system does not load
        return None


def loaded() -> Library:
    """The kernels, where they are known to be."""
    native = library()
    assert native is not None
    return native


def usable(dtype: DTypeLike) -> bool:
    """Whether the kernels compute in this type here, and `MEDUSA_JAX_PRODUCTS` allows them.

    Raises:
      UserError: an unknown value of the variable, or "native" where they cannot be compiled.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "native", "plain"):
        raise UserError(f"{VARIABLE} is plain or native, not {asked!r}")
    if asked == "plain" or jnp.dtype(dtype).name not in ("float32", "bfloat16"):
        return False
    if library() is None and asked == "native":
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
    """The shared object in the cache directory, made if it is missing or damaged.

    Its name has checksums of its sources, its compiler and itself: loading a file that is cut short
    ends the process (SIGBUS). Without a compiler, a file made by any compiler here serves.
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
        made = Path(scratch) / "kernels.so"
        for machine in machines:
            if _build([*shlex.split(compiler), *FLAGS, *machine], made):
                path = directory / f"{stem}{_digest(made.read_bytes())}.so"
                made.chmod(0o700)
                made.replace(path)  # at once: another process may be reading
                return path
    return None


def _build(command: list[str], made: Path) -> bool:
    """Compile every source, all at the same time, and link them; False: that cannot be."""
    units = [(str(s), str(made.with_name(f"{s.stem}.o"))) for s in SOURCES.glob("*.cc")]
    started = [
        subprocess.Popen(
            [*command, "-isystem", jax.ffi.include_dir(), "-c", source, "-o", unit],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for source, unit in units
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        return False
    link = [*command, "-shared", *(unit for _, unit in units), "-o", str(made)]
    return subprocess.run(link, capture_output=True).returncode == 0


def _version(compiler: str) -> bytes:
    """The command of a compiler, and its answer to --version."""
    asked = [*shlex.split(compiler), "--version"]
    return compiler.encode() + subprocess.run(asked, capture_output=True).stdout


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
