"""The compiled kernels, loaded and registered with XLA. Without them, XLA's own operations are used, with the same features."""

import atexit
import ctypes
import functools
import hashlib
import os
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from medusa_jax import programs
from medusa_jax.compiler import KERNELS, PARTS, PRODUCTS, library_file, shipped, threads
from medusa_jax.errors import UserError
from medusa_jax.host_calls import HOST, answer

HANDLERS = tuple(
    f"medusa_{name}"
    for name in ("product", "rows", "layer", "commit", "norm", "rotate", "best", "ask")
)
UNITS = {(number, bits): unit for unit, (_, number, bits) in PARTS.items()}
LOADER = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


class Library(ctypes.CDLL):
    """The compiled kernels, registered with XLA by name; `panel`: outputs of a panel of floats."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.path, self.mark = str(path), f"{path.stem}-{digest[:16]}"
        self.panel = self.call("medusa_panel_width")
        for name in HANDLERS:
            handler = jax.ffi.pycapsule(getattr(self, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
        # The kernels ask for the products of a form when they first need them.
        self.loader = LOADER(self.add_form)
        self.medusa_use_loader(self.loader)
        self.host = HOST(answer)
        self.medusa_use_host(self.host)
        atexit.register(self.medusa_use_host, None)

    def call(self, name: str, *numbers: int) -> int:
        """Call a function that takes integers and addresses; returns its integer."""
        function = getattr(self, name)
        function.restype = ctypes.c_int64
        return int(function(*map(ctypes.c_int64, numbers)))

    def add_form(self, form: int, bits: int) -> None:
        """Give the kernels the products of a form, once they are compiled; without them a call fails."""
        unit = UNITS[form, bits]
        with suppress(OSError, UserError):
            home: ctypes.CDLL = self
            if not hasattr(self, f"medusa_{unit}"):
                if (path := library_file(unit).result()) is None:
                    return
                home = ctypes.CDLL(str(path))
            self.medusa_add_form(
                ctypes.c_int64(form), ctypes.c_int64(bits), getattr(home, f"medusa_{unit}")
            )


def library() -> Library | None:
    """The kernels for this machine, compiled on first use; None if that fails."""
    return loading().result()


def begin_loading() -> None:
    """Begin to load the kernels, or to compile them, unless `MEDUSA_JAX_PRODUCTS` disables them."""
    if os.environ.get(PRODUCTS) != "plain":
        loading()


@functools.cache
def loading() -> "Future[Library | None]":
    """`library`, which becomes ready on another thread."""
    return threads.submit(_load)


def _load() -> Library | None:
    for find in (shipped, lambda: library_file(KERNELS).result()):
        # The system cannot load the file, XLA does not know its interface, or the cache is not writable.
        with suppress(OSError, RuntimeError):
            if path := find():
                native = Library(path)
                if programs.store:
                    programs.store.read_ahead()  # these call the kernels
                return native
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
    setting = os.environ.get(PRODUCTS, "")
    if setting not in ("", "native", "plain"):
        raise UserError(f"{PRODUCTS} is plain or native, not {setting!r}")
    if setting == "plain" or jnp.dtype(dtype).name not in ("float32", "bfloat16"):
        return False
    if library() is None and setting == "native":
        raise UserError(
            f"{PRODUCTS}=native needs a C++ compiler (c++, or what CXX names) that can build "
            "the kernels for this processor"
        )
    return library() is not None


def asks() -> bool:
    """Whether programs can call the host."""
    return os.environ.get(PRODUCTS) != "plain" and library() is not None


def attends(head_dim: int) -> bool:
    """Whether the native layer takes heads of this size: only whole vectors."""
    native = library()
    return native is not None and bool(native.call("medusa_attends", head_dim))
