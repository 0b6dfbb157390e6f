"""Compiled programs: jitted once for each platform, and on one CPU kept for later starts, which do not trace them."""

import functools
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.extend.backend import get_backend
from jax.tree_util import PyTreeDef

from medusa_jax.cache_directories import cache_directory
from medusa_jax.devices.platforms import OPTIONS, platform
from medusa_jax.mapped import UNREADABLE, cached, plain, read, rebuilt, write

R = TypeVar("R")
Run = Callable[[list[Any]], Any]
# The generator of all keys (`decoding/sampling.py: row_keys`).
KEYS = "threefry2x32"
# Programs of a start, and those that are being read.
LAST = 5
ahead: dict[Path, Callable[[], Any]] = {}


def use_compilation_cache() -> None:
    """Cache compiled programs on disk, unless the user has configured a directory."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", cache_directory("compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
        enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        Program.kept = enabled and jax.device_count() == 1 and platform() == "cpu"


def program(**arguments: Any) -> Callable[[Callable[..., R]], "Program[R]"]:
    """`jax.jit` with the options of the platform that is active when the program is called.

    Args:
      arguments: those of `jax.jit`, such as `static_argnums`.
    """
    return lambda function: Program(function, arguments)


class Program(Generic[R]):
    """A function that is jitted once for each platform.

    Attributes:
      kept: whether executables are kept in the user's cache: on one CPU, for functions and constants of this package.
    """

    kept = False

    def __init__(self, function: Callable[..., R], arguments: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._arguments = arguments
        static = arguments.get("static_argnums", ())
        self._static = (static,) if isinstance(static, int) else static
        self._of: Callable[[str], Any] = functools.cache(self._jitted)
        self._executables: dict[Any, Run | None] = {}

    def __call__(self, *args: Any) -> R:
        result: R | None = self._run_kept(args) if self.kept else None
        return self._of(platform())(*args) if result is None else result

    def __getattr__(self, name: str) -> Any:
        """Other methods of the jitted function, such as `lower` and `eval_shape`."""
        return getattr(self._of(platform()), name)

    def _jitted(self, platform: str, **more: Any) -> Any:
        more |= {"compiler_options": OPTIONS.get(platform), **self._arguments}
        return jax.jit(self.__wrapped__, **more)

    def _run_kept(self, args: tuple[Any, ...]) -> Any:
        """The result, by an executable that is or will be kept; None if these arguments have none."""
        static = [args[i] for i in self._static if i < len(args)]
        leaves, structure = jax.tree.flatten(
            [x for i, x in enumerate(args) if i not in self._static]
        )
        kinds = {*map(type, leaves)}
        if any(issubclass(k, jax.core.Tracer) or not hasattr(k, "dtype") for k in kinds):
            return None
        types = tuple((x.shape, x.dtype) for x in leaves)
        key = *static, structure, types
        if key not in self._executables:
            marks = static, str(structure), [[*map(str, pair)] for pair in types]
            self._executables[key] = self._executable(args, marks)
        run = self._executables[key]
        return run and run(leaves)

    def _executable(self, args: tuple[Any, ...], marks: Any) -> "Run | None":
        """Read the executable for these arguments, or compile and keep it; None where it cannot be kept."""
        if not self.__module__.startswith("medusa_jax."):
            return None
        try:
            path = cached("programs", self.__module__, self.__qualname__, marks)
        except TypeError:
            return None
        with suppress(*UNREADABLE):
            loaded, results, keys = ahead.pop(path, partial(read_program, path))()
            return runner(loaded, jax.tree.structure(rebuilt(json.loads(results))), keys)
        lowered = self._jitted(platform(), keep_unused=True).lower(*args)
        loaded = compile_new(lowered).runtime_executable()
        infos = jax.tree.leaves(lowered.out_info)
        keys = [i for i, x in enumerate(infos) if is_key(x)]
        with suppress(
            TypeError, RuntimeError
        ):  # results or a program that cannot be written
            results = jax.tree.unflatten(lowered.out_tree, range(len(infos)))
            data, shown = loaded.serialize(), json.dumps(plain(results))
            code = np.frombuffer(data, np.uint8)
            write(path, (code, hashlib.sha256(data).hexdigest(), shown, keys))
        return runner(loaded, lowered.out_tree, keys)


def runner(loaded: Any, results: PyTreeDef, keys: list[int]) -> Run:
    """Run an executable of XLA, which takes and returns random keys as words; `keys`: numbers of those results."""

    def run(leaves: list[Any]) -> Any:
        parts = loaded.execute_sharded([buffer(x) for x in leaves])
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


def compile_new(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile, though JAX's cache may have the program: XLA cannot write one that it has read."""
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()  # JAX looks at the setting once
        return lowered.compile()
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
    if Program.kept:
        files = [p for p in Path(cache_directory("programs")).iterdir() if p.is_file()]
        last = sorted(files, key=lambda path: path.stat().st_mtime_ns)[-LAST:]
        pool = ThreadPoolExecutor(1)
        ahead.update({path: pool.submit(read_program, path).result for path in last})
