"""The seam to the engine for one CPU, the room `cpu/`, which nothing imports on another platform.

XLA for CPU reads kernels below memory speed and rounds by the number of rows. The engine replaces its products
of few rows (`Stored.product`) and whole layers over few tokens. Everywhere else XLA computes everything.
"""

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.sharding import Params

Pair = tuple[jax.Array, jax.Array]


class Engine(Protocol):
    """What other rooms call of `medusa_jax.cpu`."""

    def usable(self, dtype: DTypeLike) -> bool:
        """Whether the engine computes in this type here: it is compiled, and the user does not refuse it."""

    def attends(self, head_dim: int) -> bool:
        """Whether `layer` takes heads of this size."""

    def mark(self) -> str:
        """A name of the compiled kernels, for notes about measurements."""

    def choose(self, config: LlamaConfig, dtype: DTypeLike, plain: Any) -> Any:
        """The `Storage` that is fastest here: `plain`, or the same types in panels."""

    def prepare(
        self, config: LlamaConfig, part: Params, blocks: Params, place: Any
    ) -> Params:
        """An entry of the backbone whose kernels are `BlockRows`, as decoding reads it.

        Args:
          part: the entry, such as {"layers_3": ...}.
          blocks: its inner entries that are `BlockRows`.
          place: converts the entry without these.
        """

    def panels(self, kernel_IO: jax.Array, scales_O: jax.Array | None, panel: int) -> Any:
        """A kernel, times the scale of each output, in panels: a `Stored`."""

    def layer(
        self, config: LlamaConfig, params: Mapping[str, Any], x_BTD: jax.Array, rope: Pair, mask: Any,
        cache: Pair, start_B: jax.Array,
    ) -> tuple[jax.Array, Pair]:  # fmt: skip
        """The result of `Block` for few new tokens along their paths, and the cache with them."""

    def norm(self, x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
        """`RMSNorm`, summed in one order for any number of rows."""

    def rotate(
        self, x_BTNH: jax.Array, cos_BT1H: jax.Array, sin_BT1H: jax.Array
    ) -> jax.Array:
        """`model.rope.rotate`, rounded alike in every program."""

    def read(self, x: jax.Array) -> jax.Array:
        """The sum of x [n], read by all threads."""


def cpu() -> Engine:
    """The engine. Its callers run on one CPU device: the platform chooses."""
    return cast(Engine, importlib.import_module("medusa_jax.cpu"))


def engine_for(dtype: DTypeLike, mesh: Mesh) -> Engine | None:
    """The engine if this mesh is one CPU device and the engine computes in this type; else None."""
    one_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    return cpu() if one_cpu and cpu().usable(dtype) else None
