"""Find compiled kernels in a platform's wheel, or compile them for this processor and keep them in the user's cache.

These are `KERNELS`, and a library with the products for each form of weights, for models that have it.
JAX is not imported here, so that a command can begin before it.
"""

import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from medusa_jax.cache_directories import cache_directory
from medusa_jax.console import announced, timed
from medusa_jax.devices.machine import accelerator, instruction_limit, processor
from medusa_jax.errors import UserError

PRODUCTS = "MEDUSA_JAX_PRODUCTS"
SOURCES = Path(__file__).parent / "cpu"
# Where a platform's wheel has its libraries, one for each of the `VARIANTS`.
SHIPPED = SOURCES / "compiled"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-ffp-contract=off")
# Flags for this processor, to be tried in this order: compilers for x86, for both, for ARM.
MACHINE = "-march=native -mprefer-vector-width=512", "-march=native", "-mcpu=native"
# Flags for XLA's limits on instructions: the kernels obey the same limit as its programs.
LIMITED = {
    "SSE4_2": "-march=x86-64-v2",
    "AVX": "-march=sandybridge",
    "AVX2": "-march=x86-64-v3",
    "AVX512": "-march=x86-64-v4",
}
V3 = "avx2 fma f16c bmi1 bmi2 movbe abm"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
WIDE = "-march=x86-64-v4 -mprefer-vector-width=512"
# Libraries of a wheel by machine, the fastest first: the compiler's flags, and the processor features they need.
VARIANTS = {
    "x86_64": {
        "x86-64-v4-vnni": (f"{WIDE} -mavx512vnni", f"{V4} avx512_vnni"),
        "x86-64-v4": (WIDE, V4),
        "x86-64-v3-vnni": ("-march=x86-64-v3 -mavxvnni", f"{V3} avx_vnni"),
        "x86-64-v3": ("-march=x86-64-v3", V3),
    },
    "aarch64": {
        "armv8.2-a-dotprod": ("-march=armv8.2-a+dotprod", "asimd asimddp"),
        "armv8-a": ("-march=armv8-a", "asimd"),
    },
}
BLOCKS = "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"
# Forms of weights in panels; see `enum Form` in cpu/blocks.h.
FORMS = {"float32": 1, "bfloat16": 2, "int8": 4}
FORMS |= {name: 16 + i for i, name in enumerate(BLOCKS)}
# The library that XLA calls, and one for each form of weights and bits of activations (0: floats).
KERNELS = "kernels"
PARTS = {
    f"{form}_{bits}": (form, number, bits)
    for form, number in FORMS.items()
    for bits in ((16, 8) if number >= FORMS["int8"] else (0,))
}
# One thread waits until `KERNELS` is ready (`native.loading`); the others compile.
threads = ThreadPoolExecutor(1 + (os.cpu_count() or 1))


def begin() -> None:
    """Begin to find or compile the kernels if this process seems to decode on a CPU."""
    platforms = os.environ.get("JAX_PLATFORMS") or accelerator() or "cpu"
    if platforms == "cpu" and compiles():
        library_file(KERNELS)


@functools.cache
def library_file(unit: str) -> "Future[Path | None]":
    """The library `KERNELS` or one of `PARTS`, found or compiled on another thread; None without a compiler."""
    return threads.submit(find_or_compile, unit)


def begin_products(forms: Iterable[str], activations: int) -> None:
    """Begin to find or compile the products for these forms of weights, with activations of 16 or 8 bits.

    Blocks of other forms are unpacked to float32.
    """
    known = {form if form in FORMS else "float32" for form in forms}
    units = {f"{form}_{bits}" for form in known for bits in (0, activations)}
    if compiles():
        for unit in sorted(units & PARTS.keys()):
            library_file(unit)


def compiles() -> bool:
    """Whether kernels are found in the cache or compiled: they are not disabled, and none came for this processor."""
    return os.environ.get(PRODUCTS) != "plain" and shipped() is None


def shipped() -> Path | None:
    """The library with all kernels that came with the package and suits this processor and XLA's limit."""
    limit, features = instruction_limit(), set(processor().split())
    for name, (_, needed) in VARIANTS.get(platform.machine(), {}).items():
        obeys = limit not in LIMITED or LIMITED[limit] == f"-march={name}"
        path = SHIPPED / f"{name}.so"
        if obeys and features.issuperset(needed.split()) and path.exists():
            return path
    return None


def find_or_compile(unit: str) -> Path | None:
    """Path of a library in the cache directory; compiles it if it is missing or damaged.

    Its name contains checksums of its sources, its compiler and its content: loading a truncated
    file would end the process (SIGBUS). Without a compiler, a file from any compiler is used.
    """
    found = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    compiler = os.environ.get("CXX") or next(filter(None, found), None)
    try:
        shlex.split(compiler or "")
    except ValueError as error:
        raise UserError(f"CXX is no command: {error} in {compiler!r}") from error
    limit = instruction_limit()
    machines = (LIMITED[limit],) if limit in LIMITED else MACHINE
    marks = [platform.machine(), processor(), str((FLAGS, machines))]
    sources = [*sorted(SOURCES.glob("*.[ch]*")), headers() / "xla/ffi/api/c_api.h"]
    made_from = _digest("\n".join(marks).encode(), *(s.read_bytes() for s in sources))
    made_by = _digest(_version(compiler)) if compiler else "*"
    directory, stem = Path(cache_directory("native")), f"{unit}-{made_from}-{made_by}-"
    for path in sorted(directory.glob(f"{stem}*.so")):
        mine = not path.stat().st_mode & 0o022
        if mine and path.stem.endswith(f"-{_digest(path.read_bytes())}"):
            return path
        path.unlink(missing_ok=True)
    if compiler is None:
        return None
    weights = f"{PARTS[unit][0]} weights" if unit in PARTS else "this processor"
    what = f"compiling kernels for {weights}, once"
    with (
        announced(what, after=5.0),
        timed(what),
        tempfile.TemporaryDirectory(dir=directory) as scratch,
    ):
        output = Path(scratch) / "kernels.so"
        for machine in machines:
            if compiled(f"{compiler} {machine}", [unit], output):
                path = directory / f"{stem}{_digest(output.read_bytes())}.so"
                output.chmod(0o700)
                output.replace(path)  # atomic: another process may be reading
                return path
    return None


def ship(machine: str, directory: Path) -> None:
    """Compile all kernels for the variants of a machine, for its wheel."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, (flags, _) in VARIANTS[machine].items():
        command = f"{os.environ.get('CXX') or 'c++'} {flags}"
        if not compiled(command, [KERNELS, *PARTS], directory / f"{name}.so"):
            raise UserError(f"the kernels for {name} do not compile: {command}")


def compiled(command: str, units: Sequence[str], output: Path) -> bool:
    """Compile units in parallel and link them to a library; returns whether that succeeded."""
    compiler = [*shlex.split(command), *FLAGS]

    def compile_one(unit: str, to: str) -> bool:
        _, form, bits = PARTS.get(unit, ("", 0, 0))
        names = f"NAME=medusa_{unit}", f"FORM={form}", f"BITS={bits}"
        source = SOURCES / ("form.cc" if form else "kernels.cc")
        macros = [f"-DMEDUSA_{name}" for name in names]
        return _succeeds(
            [*compiler, *macros, "-isystem", headers(), "-c", source, "-o", to]
        )

    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        objects = [os.path.join(scratch, f"{unit}.o") for unit in units]
        done = all(list(pool.map(compile_one, units, objects)))
        return done and _succeeds([*compiler, "-shared", *objects, "-o", output])


def headers() -> Path:
    """Where the installed jaxlib has XLA's headers; as `jax.ffi.include_dir`, which imports JAX."""
    found = importlib.util.find_spec("jaxlib")
    return Path((found and found.origin) or "jaxlib").parent / "include"


def _succeeds(command: list[str | Path]) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


@functools.cache
def _version(compiler: str) -> bytes:
    """A compiler's command and its output for --version."""
    command = [*shlex.split(compiler), "--version"]
    return compiler.encode() + subprocess.run(command, capture_output=True).stdout


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
