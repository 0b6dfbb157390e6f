"""Functions that are jitted for the platform which is active at a call, and the store that keeps their programs."""

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

from medusa_jax.devices.platforms import platform

R = TypeVar("R")
# XLA for TPUs takes the product of one row with a kernel as multiplications and a sum on the vector
# unit, 2.6 to 3.3 times as many cycles as two rows on the matrix unit by the compiler's estimates.
# On CUDA the host reads the condition of a loop after every step, and the call returns only when the loop
# has ended. As a CUDA graph (WHILE, the rest is XLA's default) the device reads it: research/log/.
OPTIONS: dict[str, dict[str, str | bool]] = {
    "tpu": {"xla_tpu_enable_dot_strength_reduction": False},
    "cuda": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
        "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    },
}


# Keeps compiled programs for later starts (`kept_programs.KeptPrograms`); None: they are not kept.
store: Any = None


def program(
    *, each_step: bool = False, **arguments: Any
) -> Callable[[Callable[..., R]], "Program[R]"]:
    """`jax.jit` with the options of the platform that is active when the program is called.

    Args:
      each_step: called at every step: not kept for later starts, since JAX calls its own programs faster.
      arguments: passed to `jax.jit`, such as `static_argnums`.
    """
    return lambda function: Program(function, arguments, not each_step)


class Program(Generic[R]):
    """A function that is jitted once for each platform, or kept in the store; `arguments` are passed to `jax.jit`."""

    def __init__(
        self, function: Callable[..., R], arguments: dict[str, Any], may_be_kept: bool
    ) -> None:
        functools.update_wrapper(self, function)
        self.arguments, self._may_be_kept = arguments, may_be_kept
        self._of: Callable[[str], Any] = functools.cache(self.jitted)

    def __call__(self, *args: Any) -> R:
        result = store.run(self, args) if store and self._may_be_kept else None
        return self._of(platform())(*args) if result is None else result

    def prepare(self, *args: Any) -> Any:
        """Begin to read or compile the program for arrays of these shapes; None where it cannot be kept."""
        return store.prepare(self, args) if store and self._may_be_kept else None

    def __getattr__(self, name: str) -> Any:
        """Other methods of the jitted function, such as `lower` and `eval_shape`."""
        return getattr(self._of(platform()), name)

    def jitted(self, platform: str, **more: Any) -> Any:
        """The function jitted for a platform, with more arguments."""
        more |= {"compiler_options": OPTIONS.get(platform), **self.arguments}
        return jax.jit(self.__wrapped__, **more)
