"""Compiled programs of one CPU, kept for later starts, which neither trace nor compile them."""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.extend.backend import get_backend
from jax.tree_util import PyTreeDef

from medusa_jax.cache_directories import cache_directory
from medusa_jax.console import timed
from medusa_jax.devices.platforms import Program, platform
from medusa_jax.mapped import UNREADABLE, cached, plain, read, rebuilt, write

R = TypeVar("R")
Run = Callable[[list[Any]], Any]
# The generator of all keys (`decoding/sampling.py: row_keys`).
KEYS = "threefry2x32"
# Programs of a start, and those that are being read.
LAST = 5
UNSEEN: Any = object()
ahead: dict[Path, Callable[[], Any]] = {}
executables: dict[Any, Run | None] = {}


def use_compilation_cache() -> None:
    """Cache compiled programs on disk, unless the user has configured a directory."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", cache_directory("compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
        enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        if enabled and jax.device_count() == 1 and platform() == "cpu":
            Program.run_kept = run_kept


def run_kept(program: Program[R], args: tuple[Any, ...]) -> R | None:
    """`Program.run_kept`: run an executable that is or will be kept; None if these arguments have none."""
    numbers = program.arguments.get("static_argnums", ())
    numbers = (numbers,) if isinstance(numbers, int) else numbers
    static = [args[i] for i in numbers if i < len(args)]
    dynamic = [x for i, x in enumerate(args) if i not in numbers]
    leaves, structure = jax.tree.flatten(dynamic)
    kinds = {*map(type, leaves)}
    if any(issubclass(k, jax.core.Tracer) or not hasattr(k, "dtype") for k in kinds):
        return None
    types = tuple((x.shape, x.dtype) for x in leaves)
    key = program, *static, structure, types
    run = executables.get(key, UNSEEN)
    if run is UNSEEN:
        marks = static, str(structure), [[*map(str, pair)] for pair in types]
        run = executables[key] = executable(program, args, marks)
    return run and run(leaves)


def executable(program: Program[R], args: tuple[Any, ...], marks: Any) -> Run | None:
    """Read the executable for these arguments, or compile and keep it; None where it cannot be kept."""
    if not program.__module__.startswith("medusa_jax."):
        return None
    try:
        path = cached("programs", program.__module__, program.__qualname__, marks)
    except TypeError:
        return None
    with suppress(*UNREADABLE):
        loaded, results, keys = ahead.pop(path, partial(read_program, path))()
        return runner(loaded, jax.tree.structure(rebuilt(json.loads(results))), keys)
    with timed(f"compiling {program.__qualname__}, once"):
        lowered = program.jitted("cpu", keep_unused=True).lower(*args)
        loaded = compile_new(lowered)
    infos = jax.tree.leaves(lowered.out_info)
    keys = [i for i, x in enumerate(infos) if is_key(x)]
    with suppress(TypeError, RuntimeError):  # results or a program that cannot be written
        results = jax.tree.unflatten(lowered.out_tree, range(len(infos)))
        data, shown = loaded.serialize(), json.dumps(plain(results))
        code = np.frombuffer(data, np.uint8)
        write(path, (code, hashlib.sha256(data).hexdigest(), shown, keys))
    return runner(loaded, lowered.out_tree, keys)


def runner(loaded: Any, results: PyTreeDef, keys: list[int]) -> Run:
    """Run an executable of XLA, which takes and returns random keys as words; `keys`: numbers of those results."""
    array = type(jax.device_put(0))

    def run(leaves: list[Any]) -> Any:
        buffers = [x if type(x) is array else buffer(x) for x in leaves]
        if any(isinstance(x, jax.core.Tracer) for x in buffers):
            return None  # NumPy arrays while another program is traced
        parts = loaded.execute_sharded(buffers)
        values = [value for [value] in parts.disassemble_into_single_device_arrays()]
        for i in keys:
            values[i] = jax.random.wrap_key_data(values[i], impl=KEYS)
        return jax.tree.unflatten(results, values)

    return run


def buffer(x: Any) -> jax.Array:
    """An argument as XLA takes it. Memory of NumPy is copied, since a donated argument is written to."""
    if isinstance(x, np.ndarray | np.generic):
        return jax.device_put(x, may_alias=False)
    return jax.random.key_data(x) if is_key(x) else x


def is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def compile_new(lowered: jax.stages.Lowered) -> Any:
    """XLA's executable, compiled though JAX's cache may have the program: XLA cannot write one that it has read."""
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()  # JAX looks at the setting once
        return lowered.compile().runtime_executable()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        reset_cache()


def read_program(path: Path) -> tuple[Any, str, list[int]]:
    """A program of XLA, and the structure (in JSON) and the keys of its results.

    Raises: one of `UNREADABLE`.
    """
    code, checksum, results, keys = read(path)
    data = np.asarray(code).tobytes()
    if hashlib.sha256(data).hexdigest() != checksum:
        raise ValueError(f"{path} is damaged")
    return get_backend().deserialize_executable(data, jax.devices(), None), results, keys


def read_ahead() -> None:
    """Begin to read the programs of the last start, in the order in which it ran them."""
    if Program.run_kept:
        files = [p for p in Path(cache_directory("programs")).iterdir() if p.is_file()]
        last = sorted(files, key=lambda path: path.stat().st_mtime_ns)[-LAST:]
        pool = ThreadPoolExecutor(1)
        ahead.update({path: pool.submit(read_program, path).result for path in last})
