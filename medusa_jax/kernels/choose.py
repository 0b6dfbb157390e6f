"""Choose the kernels for a platform and a type; reads MEDUSA_JAX_ATTENTION."""

import os
from collections.abc import Iterable

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from medusa_jax.devices.platforms import platform, platform_of
from medusa_jax.errors import UserError
from medusa_jax.model.kernels import PLAIN, Kernels

# "own": neither attention kernels of libraries nor ours for TPUs.
ATTENTION = "MEDUSA_JAX_ATTENTION"


def choose_kernels(
    mesh: Mesh | AbstractMesh | None = None,
    dtype: DTypeLike | None = None,
    head_dim: int = 0,
) -> Kernels:
    """The fastest kernels for these devices, which need not be here.

    MEDUSA_JAX_ATTENTION=own disables attention kernels. On one CPU, MEDUSA_JAX_PRODUCTS chooses whether a model is
    decoded by the native kernels: "plain", "native", or "" where they can be compiled.

    Args:
      mesh: None: the mesh in sight, else the default device.
      dtype: the type that a model is decoded in; None: for training, or for parameters in plain form.
      head_dim: of that model's attention; 0: without whole native layers.

    Raises:
      UserError: a variable has an unknown value, or MEDUSA_JAX_PRODUCTS cannot be followed.
    """
    name = platform() if mesh is None else platform_of(mesh)
    setting = os.environ.get(ATTENTION, "")
    if setting not in ("", "own"):
        raise UserError(f"{ATTENTION} is own or not set, not {setting!r}")
    library_attention = setting != "own"
    # Only the chosen file is loaded.
    if name == "cuda":
        from medusa_jax.kernels.cuda import CudaKernels

        return CudaKernels(library_attention)
    if name == "tpu":
        from medusa_jax.kernels.tpu import TpuKernels

        return TpuKernels(library_attention)
    if name != "cpu":
        return PLAIN
    if mesh is not None and mesh.size == 1 and dtype is not None:
        from medusa_jax.kernels.one_cpu import native_kernels

        if kernels := native_kernels(jnp.dtype(dtype), head_dim):
            return kernels
    from medusa_jax.kernels.cpu import CpuKernels

    return CpuKernels()


def begin_loading(mesh: Mesh, forms: Iterable[str] = (), activations: int = 16) -> None:
    """Begin to load the kernels that `choose_kernels` waits for, or to compile them, and `compiler.begin_products`."""
    if platform_of(mesh) == "cpu" and mesh.size == 1:
        from medusa_jax import compiler, native

        native.begin_loading()
        compiler.begin_products(forms, activations)
