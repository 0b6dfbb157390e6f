"""Compiled programs of one CPU, kept for later starts, which neither trace nor compile them."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.extend.backend import get_backend
from jax.tree_util import PyTreeDef

from medusa_jax import programs
from medusa_jax.cache_directories import cache_directory
from medusa_jax.console import timed
from medusa_jax.devices.platforms import platform
from medusa_jax.mapped import UNREADABLE, cached, kept_files, plain, read, rebuilt, write
from medusa_jax.programs import Program

R = TypeVar("R")
Run = Callable[[list[Any]], Any]
# The generator of all keys (`decoding/sampling.py: row_keys`).
KEYS = "threefry2x32"
# Number of recently used programs to read ahead.
LAST = 5
# Marks a call not looked up yet.
UNSEEN: Any = object()
# XLA uses several threads for a part of each compilation only, so two at a time are faster.
compiling = ThreadPoolExecutor(2)
# Number of `without_cache` blocks that run now, and its lock.
blocks, counting = [0], threading.Lock()


class Call(NamedTuple):
    """A call of a program: its key, and its arrays."""

    program: Program[Any]
    args: tuple[Any, ...]
    key: tuple[Any, ...]
    leaves: list[Any]


class Kept(NamedTuple):
    """An executable that is or will be kept, and the shapes of its results."""

    run: Future[Run]
    results: Any


def use_compilation_cache() -> bool:
    """Cache compiled programs on disk, unless the user has configured a directory.

    Returns: whether programs are kept for later starts, in `programs.store`.
    """
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", cache_directory("compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
        enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        if enabled and jax.device_count() == 1 and platform() == "cpu":
            programs.store = KeptPrograms()
    return programs.store is not None


class KeptPrograms:
    """The store of one CPU: executables in files of the cache."""

    def __init__(self) -> None:
        self.executables: dict[Any, Kept | None] = {}
        self._ahead: dict[Path, Callable[[], Any]] = {}

    def run(self, program: Program[R], args: tuple[Any, ...]) -> R | None:
        """Run an executable that is or will be kept; None if these arguments have none."""
        if (call := call_of(program, args)) is None:
            return None
        kept = self.executables.get(call.key, UNSEEN)
        if kept is UNSEEN:
            kept = self._add(call, at_once)
        return kept and kept.run.result()(call.leaves)

    def prepare(self, program: Program[Any], args: tuple[Any, ...]) -> Kept | None:
        """Read the executable, or trace here and compile on another thread; None where it cannot be kept."""
        if (call := call_of(program, args)) is None:
            return None
        return self.executables.get(call.key) or self._add(call, compiling.submit)

    def read_ahead(self) -> None:
        """Begin to read the `LAST` programs used last, in the order of their last use."""
        last = [path for *_, path in kept_files(Path(cache_directory("programs")))[-LAST:]]
        pool = ThreadPoolExecutor(1)
        self._ahead |= {path: pool.submit(read_program, path).result for path in last}

    def _add(self, call: Call, submit: Callable[..., Future[Run]]) -> Kept | None:
        """Remember a program, unless it fails: then the next call compiles again. `submit` compiles, now or on another thread."""
        # The callback keeps the key, not `call`, whose arrays would stay alive.
        kept, key = None, call.key
        if path := path_of(call):
            kept = self._read(path)
            if kept is None:
                lowered = lowered_for(call.program, call.args)
                shapes = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info
                )
                kept = Kept(submit(compile_and_keep, call.program, lowered, path), shapes)
        self.executables[key] = kept
        if kept:
            kept.run.add_done_callback(
                lambda run: run.exception() and self.executables.pop(key)
            )
        return kept

    def _read(self, path: Path) -> Kept | None:
        with suppress(*UNREADABLE):
            loaded, shown, infos = self._ahead.pop(path, partial(read_program, path))()
            leaves = [jax.ShapeDtypeStruct(shape, dtype_of(name)) for shape, name in infos]
            structure = jax.tree.structure(rebuilt(json.loads(shown)))
            run = at_once(runner, loaded, structure, leaves)
            return Kept(run, jax.tree.unflatten(structure, leaves))
        return None


def at_once(compile_one: Callable[..., Run], *args: Any) -> Future[Run]:
    """Compile on this thread: one of the pool would not have its priority, which may be low."""
    run: Future[Run] = Future()
    try:
        run.set_result(compile_one(*args))
    except Exception as error:
        run.set_exception(error)
    return run


def call_of(program: Program[R], args: tuple[Any, ...]) -> Call | None:
    """Describe a call; None where its arguments are traced or not arrays."""
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
    return Call(program, args, key, leaves)


def path_of(call: Call) -> Path | None:
    """The file of an executable; None where it cannot be kept."""
    program, *static, structure, types = call.key
    marks = static, str(structure), [[*map(str, pair)] for pair in types]
    if not program.__module__.startswith("medusa_jax."):
        return None
    with suppress(TypeError):
        return cached("programs", program.__module__, program.__qualname__, marks)
    return None


def lowered_for(program: Program[R], args: tuple[Any, ...]) -> jax.stages.Lowered:
    return program.jitted("cpu", keep_unused=True).lower(*args)


def compile_and_keep(program: Program[R], lowered: jax.stages.Lowered, path: Path) -> Run:
    with timed(f"compiling {program.__qualname__}, once"):
        loaded = compile_new(lowered)
    leaves = jax.tree.leaves(lowered.out_info)
    with suppress(TypeError, RuntimeError):  # results or a program that cannot be written
        results = jax.tree.unflatten(lowered.out_tree, range(len(leaves)))
        data, shown = loaded.serialize(), json.dumps(plain(results))
        code, infos = (
            np.frombuffer(data, np.uint8),
            [[x.shape, str(x.dtype)] for x in leaves],
        )
        write(path, (code, hashlib.sha256(data).hexdigest(), shown, infos))
    return runner(loaded, lowered.out_tree, leaves)


def runner(loaded: Any, structure: PyTreeDef, results: list[Any]) -> Run:
    """Run an executable of XLA, which takes and returns random keys as words; `results` have their types."""
    array, keys = type(jax.device_put(0)), [i for i, x in enumerate(results) if is_key(x)]

    def run(leaves: list[Any]) -> Any:
        buffers = [x if type(x) is array else buffer(x) for x in leaves]
        if any(isinstance(x, jax.core.Tracer) for x in buffers):
            return None  # NumPy arrays while another program is traced
        parts = loaded.execute_sharded(buffers)
        values = [value for [value] in parts.disassemble_into_single_device_arrays()]
        for i in keys:
            values[i] = jax.random.wrap_key_data(values[i], impl=KEYS)
        return jax.tree.unflatten(structure, values)

    return run


def buffer(x: Any) -> jax.Array:
    """An argument as XLA takes it. Memory of NumPy is copied, since a donated argument is written to."""
    if isinstance(x, np.ndarray | np.generic):
        return jax.device_put(x, may_alias=False)
    return jax.random.key_data(x) if is_key(x) else x


def is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def compile_new(lowered: jax.stages.Lowered) -> Any:
    """Compile without JAX's cache: XLA cannot serialise an executable that it loaded from there."""
    with without_cache():
        return lowered.compile().runtime_executable()


@contextmanager
def without_cache() -> Iterator[None]:
    """Disable JAX's cache while this block runs on any thread."""

    def add(change: int) -> None:
        with counting:
            blocks[0] += change
            jax.config.update("jax_enable_compilation_cache", blocks == [0])
            reset_cache()  # JAX looks at the setting once

    add(1)
    try:
        yield
    finally:
        add(-1)


def dtype_of(name: str) -> Any:
    """The type of this name, as `str` gives it; "key<fry>" is a random key's."""
    if name.startswith("key<"):
        return jax.eval_shape(partial(jax.random.key, impl=KEYS), 0).dtype
    return jax.numpy.dtype(name)


def read_program(path: Path) -> tuple[Any, str, list[Any]]:
    """A program of XLA, and the structure (in JSON) and the shapes and types of its results.

    Raises: one of `UNREADABLE`.
    """
    code, checksum, shown, infos = read(path)
    data = np.asarray(code).tobytes()
    if hashlib.sha256(data).hexdigest() != checksum:
        raise ValueError(f"{path} is damaged")
    return get_backend().deserialize_executable(data, jax.devices(), None), shown, infos
