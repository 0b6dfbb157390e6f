"""Functions of the host that a running program calls: cheaper than a launch of one program for each step."""

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

# Gets an address, from which on addresses and sizes of arrays are, and their number.
HOST = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
numbers = itertools.count(1)
functions: "dict[int, HostFunction]" = {}


class HostFunction:
    """A function that programs can call by its number while this is open.

    Args:
      function: gets the arguments and the results of a call, flat arrays of int32. The results are zeros until it
        writes them, and stay so where it fails or is closed.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function, self.number = function, next(numbers)
        self._error: BaseException | None = None

    def __enter__(self) -> "HostFunction":
        functions[self.number] = self
        return self

    def __exit__(self, *_: object) -> None:
        functions.pop(self.number, None)

    def __call__(self, *arrays: np.ndarray) -> None:
        try:
            self._function(*arrays)
        except BaseException as error:  # Ctrl-C, too: a program cannot raise it
            self._error = error
            self.__exit__()

    def check(self) -> None:
        """Raise the error of a call."""
        if self._error:
            raise self._error


def answer(address: int, n: int) -> None:
    """Call the function whose number is the first array."""
    pairs = (ctypes.c_int64 * (2 * n)).from_address(address)
    number, *arrays = map(view, pairs[::2], pairs[1::2])
    if function := functions.get(int(number[0])):
        function(*arrays)


@functools.lru_cache(maxsize=256)  # the steps of a loop have the same buffers
def view(address: int, size: int) -> np.ndarray:
    """The int32 at an address."""
    return np.frombuffer((ctypes.c_int32 * size).from_address(address), np.int32)


def ask(
    number: jax.Array, arguments: Sequence[ArrayLike], shapes: Sequence[tuple[int, ...]]
) -> list[jax.Array]:
    """Call a `HostFunction` by its number [1]; returns its results."""
    results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    # Not marked as one with side effects, which JAX would launch slowly: its results are used once, and depend on the step.
    call = jax.ffi.ffi_call("medusa_ask", results)
    return list(call(number, *(jnp.asarray(x, jnp.int32) for x in arguments)))
