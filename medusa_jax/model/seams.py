"""The seams of this room: code that only one platform or only training needs, imported by name.

- `cpu()`: the engine for one CPU, the room `cpu/`. XLA for CPU reads kernels below memory speed and rounds by the
  number of rows; the engine replaces its products of few rows (`Stored.product`) and whole layers over few tokens.
- `attention_kernels()`: cuDNN, and kernels for TPUs.
- `tpu()`: forms of single operations for TPUs.
- `training()`: adapters, quantised kernels, recomputation.
"""

import importlib
import os
from types import ModuleType

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.devices.platforms import platform

Pair = tuple[jax.Array, jax.Array]


def cpu() -> ModuleType:
    """The engine, for callers on one CPU device: the platform chooses."""
    return importlib.import_module("medusa_jax.cpu")


def engine_for(dtype: DTypeLike, mesh: Mesh) -> ModuleType | None:
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
