"""Compiled programs: jitted once for each platform, and on one CPU kept for later starts, which do not trace them."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.extend.backend import get_backend
from jax.tree_util import PyTreeDef

from medusa_jax.cache_directories import cache_directory
from medusa_jax.devices.platforms import OPTIONS, platform
from medusa_jax.mapped import UNREADABLE, as_json, cached, from_json, read, write

R = TypeVar("R")
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
        Program.kept = jax.device_count() == 1 and platform() == "cpu"


def program(**arguments: Any) -> Callable[[Callable[..., R]], "Program[R]"]:
    """`jax.jit` with the options of the platform that is active when the program is called.

    Args:
      arguments: those of `jax.jit`, such as `static_argnums`.
    """
    return lambda function: Program(function, arguments)


class Program(Generic[R]):
    """A function that is jitted once for each platform.

    Attributes:
      kept: whether executables are kept in the user's cache, for functions and static arguments of this package.
    """

    kept = False

    def __init__(self, function: Callable[..., R], arguments: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._arguments = arguments
        static = arguments.get("static_argnums", ())
        self._static = (static,) if isinstance(static, int) else static
        self._of: Callable[[str], Any] = functools.cache(self._jitted)
        self._executables: dict[Any, Executable | None] = {}

    def __call__(self, *args: Any) -> R:
        result: R | None = self._kept(args) if self.kept else None
        if result is None:
            result = self._of(platform())(*args)
        return result

    def __getattr__(self, name: str) -> Any:
        """Other methods of the jitted function, such as `lower` and `eval_shape`."""
        return getattr(self._of(platform()), name)

    def _jitted(self, platform: str, **more: Any) -> Any:
        options = OPTIONS.get(platform)
        return jax.jit(
            self.__wrapped__, compiler_options=options, **self._arguments, **more
        )

    def _kept(self, args: tuple[Any, ...]) -> Any:
        """The result, by an executable that is or will be kept; None if these arguments have none."""
        static = [args[i] for i in self._static if i < len(args)]
        dynamic = [x for i, x in enumerate(args) if i not in self._static]
        leaves, structure = jax.tree.flatten(dynamic)
        kinds = tuple(map(type, leaves))
        if any(issubclass(k, jax.core.Tracer) or not hasattr(k, "dtype") for k in {*kinds}):
            return None
        types = tuple((x.shape, x.dtype) for x in leaves)
        key = *static, structure, kinds, types
        if key not in self._executables:
            shapes = [[[*shape], str(dtype)] for shape, dtype in types]
            self._executables[key] = self._executable(args, static, str(structure), shapes)
        executable = self._executables[key]
        return executable and executable(leaves)

    def _executable(self, args: tuple[Any, ...], *marks: Any) -> "Executable | None":
        """Read the executable for these arguments, or compile and keep it; None where it cannot be kept."""
        try:
            if not self.__module__.startswith("medusa_jax."):
                raise TypeError("not of this package")
            path = cached("programs", self.__module__, self.__qualname__, *marks)
        except TypeError:
            return None
        with suppress(*UNREADABLE, RuntimeError):
            loaded, results, keys = (
                ahead.pop(path)() if path in ahead else read_program(path)
            )
            return Executable(loaded, jax.tree.structure(from_json(results)), keys)
        lowered = self._jitted(platform(), keep_unused=True).lower(*args)
        with without_jax_cache():
            loaded = lowered.compile().runtime_executable()
        infos = jax.tree.leaves(lowered.out_info)
        keys = [i for i, x in enumerate(infos) if is_key(x)]
        with suppress(RuntimeError):  # XLA cannot write it
            data = loaded.serialize()
            results = jax.tree.unflatten(lowered.out_tree, range(len(infos)))
            code = np.frombuffer(data, np.uint8)
            write(path, (code, hashlib.sha256(data).hexdigest(), as_json(results), keys))
        return Executable(loaded, lowered.out_tree, keys)


def read_program(path: Path) -> tuple[Any, str, list[int]]:
    """XLA's program, `Executable.results` in JSON, and `Executable.keys`; raises one of `UNREADABLE` or RuntimeError."""
    code, checksum, results, keys = read(path)
    data = np.asarray(code).tobytes()
    if hashlib.sha256(data).hexdigest() != checksum:
        raise ValueError(f"{path} is damaged")
    return get_backend().deserialize_executable(data, jax.devices(), None), results, keys


def read_ahead() -> None:
    """Read the programs of the last start in the order in which it ran them; the kernels that they call are loaded."""
    files = [path for path in Path(cache_directory("programs")).iterdir() if path.is_file()]
    last = sorted(files, key=lambda path: path.stat().st_mtime_ns)[-LAST:]
    with ThreadPoolExecutor(1) as pool:
        ahead.update({path: pool.submit(read_program, path).result for path in last})


@contextmanager
def without_jax_cache() -> Iterator[None]:
    """Compile, though JAX's cache may have the program: XLA cannot write one that it has read."""
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # JAX looks at the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        reset_cache()


@dataclass(frozen=True)
class Executable:
    """A compiled program for one device.

    Attributes:
      loaded: XLA's, which takes all arguments.
      results: the structure of its results.
      keys: numbers of the results that are random keys, which XLA sees as their words.
    """

    loaded: Any
    results: PyTreeDef
    keys: Sequence[int]

    def __call__(self, leaves: list[Any]) -> Any:
        found = self.loaded.execute_sharded([buffer(x) for x in leaves])
        values = [one for [one] in found.disassemble_into_single_device_arrays()]
        for i in self.keys:
            values[i] = jax.random.wrap_key_data(values[i], impl=KEYS)
        return jax.tree.unflatten(self.results, values)


def buffer(x: Any) -> jax.Array:
    """An argument as XLA takes it. Memory of NumPy is copied, since a donated argument is written to."""
    if isinstance(x, np.ndarray | np.generic):
        return jax.device_put(x, may_alias=False)
    return jax.random.key_data(x) if is_key(x) else x


def is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
