"""Functions of the host that a running program calls, which takes less time than the launch of a program."""

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

# Called with the address of a table and n: the table has n pairs, the address and the size of an array.
HOST = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
numbers = itertools.count(1)


class HostFunction:
    """A function that programs call by its number while it is open.

    Args:
      function: gets the arguments and results of a call, flat arrays of int32. Results are zeros until it writes them.
    """

    opened: ClassVar["dict[int, HostFunction]"] = {}

    def __init__(self, function: Callable[..., None]) -> None:
        self.function, self.number = function, next(numbers)
        self.error: BaseException | None = None

    def __enter__(self) -> "HostFunction":
        self.opened[self.number] = self
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.pop(self.number, None)

    def check(self) -> None:
        """Raise the error of a call, after which the function is closed."""
        if self.error:
            raise self.error


def answer(address: int, n: int) -> None:
    """Answer a call; its first array is the number of a function."""
    pairs = (ctypes.c_int64 * (2 * n)).from_address(address)
    number, *arrays = map(view, pairs[::2], pairs[1::2])
    if host := HostFunction.opened.get(int(number[0])):
        try:
            host.function(*arrays)
        except BaseException as error:  # Ctrl-C, too: a program cannot raise it
            host.error = error
            host.__exit__()


@functools.lru_cache(maxsize=256)  # the steps of a loop have the same buffers
def view(address: int, size: int) -> np.ndarray:
    """The int32 at an address."""
    memory = memoryview((ctypes.c_int32 * size).from_address(address))
    return np.frombuffer(memory, np.int32)


def ask(number_1: jax.Array, arguments: Sequence[jax.Array], shapes: Sequence) -> Sequence:
    """Call a `HostFunction`; its results have these shapes."""
    results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    # JAX launches programs with effects slowly. Nothing needs one here, since each step reads the results.
    call = jax.ffi.ffi_call("medusa_ask", results)
    return call(number_1, *(x.astype(jnp.int32) for x in arguments))
