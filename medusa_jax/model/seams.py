"""The seams of this room: code that only one platform or only training needs, imported by name.

- `cpu()`: the engine for one CPU, the room `cpu/`. XLA for CPU reads kernels below memory speed and rounds by the
  number of rows; the engine replaces its products of few rows (`Stored.product`) and whole layers over few tokens.
- `attention_kernels()`: cuDNN, and kernels for TPUs.
- `tpu()`: forms of single operations for TPUs.
- `training()`: adapters, quantised kernels, recomputation.
"""

import importlib
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol, cast

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.devices.platforms import platform
from medusa_jax.sharding import Params

Pair = tuple[jax.Array, jax.Array]


class Engine(Protocol):
    """The functions of `medusa_jax.cpu` that other rooms call."""

    def usable(self, dtype: DTypeLike) -> bool:
        """Whether the engine can compute in this type: it is compiled and not disabled by the user."""

    def attends(self, head_dim: int) -> bool:
        """Whether `layer` takes heads of this size."""

    def mark(self) -> str:
        """An identifier of the compiled kernels, stored with measurements."""

    def panel(self) -> int:
        """Outputs of a panel (`Storage.panel`)."""

    def prepare(
        self, config: LlamaConfig, part: Params, blocks: Params, rest: Params, storage: Any
    ) -> Params:
        """Convert an entry of the backbone whose kernels are `BlockRows` to decoding form.

        Args:
          part: the entry, such as {"layers_3": ...}.
          blocks: its `BlockRows`.
          rest: the rest of the entry in decoding form.
        """

    def panels(self, kernel_IO: jax.Array, scales_O: jax.Array | None, storage: Any) -> Any:
        """Store a kernel, times a scale per output, in panels of `storage`; returns a `Stored`."""

    def layer(
        self, config: LlamaConfig, params: Mapping[str, Any], x_BTD: jax.Array, rope: Pair, mask: Any,
        cache: Pair, start_B: jax.Array, read_BTI: jax.Array | None = None,
    ) -> tuple[jax.Array, Pair]:  # fmt: skip
        """The result of `Block` for few new tokens along their paths, and the cache with them.

        Attention reads `read_BTI`, by default the norm of x.
        """

    def commit(
        self, caches: list[jax.Array], start_B: jax.Array, path_BL: jax.Array
    ) -> list[jax.Array]:
        """`KVCache.commit` of all keys and values [B, G, S, H] at once."""

    def norm(self, x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
        """`RMSNorm`, summed in one order for any number of rows."""

    def rotate(
        self, x_BTNH: jax.Array, cos_BT1H: jax.Array, sin_BT1H: jax.Array
    ) -> jax.Array:
        """`model.rope.rotate`, rounded alike in every program."""


def cpu() -> Engine:
    """The engine, for callers on one CPU device: the platform chooses."""
    return cast(Engine, importlib.import_module("medusa_jax.cpu"))


def engine_for(dtype: DTypeLike, mesh: Mesh) -> Engine | None:
    """The engine if this mesh is one CPU device and the engine computes in this type; else None."""
    one_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    return cpu() if one_cpu and cpu().usable(dtype) else None


def attention_kernels() -> ModuleType | None:
    """`model/kernels.py`: the platform chooses, MEDUSA_JAX_ATTENTION=own disables it."""
    own = os.environ.get("MEDUSA_JAX_ATTENTION") == "own"
    if own or platform() not in ("cuda", "tpu"):
        return None
    return importlib.import_module("medusa_jax.model.kernels")


def tpu() -> ModuleType | None:
    """`model/tpu.py` where a program for TPUs is traced: the platform chooses."""
    if platform() != "tpu":
        return None
    return importlib.import_module("medusa_jax.model.tpu")


def training(part: str) -> ModuleType:
    """`model/lora.py`, `quantise.py` or `barrier.py`: the training configuration chooses."""
    return importlib.import_module(f"medusa_jax.model.{part}")
