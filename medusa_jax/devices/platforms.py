"""The platform that a program is traced for."""

import os

import jax
from jax.sharding import AbstractMesh, Mesh

# Least major compute capability of NVIDIA GPUs for cuDNN's attention, and for products in bfloat16: on a T4 (7.5) XLA
# unpacks kernels to float32 in memory before each, five times the bytes.
AMPERE = 8


def platform() -> str:
    """ "cpu", "cuda", "rocm" or "tpu": of the active mesh, else of `default_device`.

    A program for devices that this machine lacks is traced under `jax.set_mesh` of theirs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is not None:
        return platform_of(mesh)
    default = default_device()
    if default.platform != "gpu":
        return default.platform
    return "cuda" if "cuda" in default.client.platform_version else "rocm"


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Like `platform`, for the devices of a mesh, which may be described only."""
    device = (
        mesh.abstract_mesh.abstract_device
        if isinstance(mesh, Mesh)
        else mesh.abstract_device
    )
    if device is None:  # a mesh of sizes alone
        return platform()
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if device.device_kind.startswith("AMD") else "cuda"


def default_device() -> jax.Device:
    """The device of programs that name none: `jax_default_device`, else the first."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(default, str):  # a platform
        return jax.local_devices(backend=default)[0]
    return default or jax.devices()[0]


def before_ampere() -> bool:
    """Whether the default device is an NVIDIA GPU without cuDNN's attention and products in bfloat16."""
    major = str(getattr(default_device(), "compute_capability", "")).partition(".")[0]
    return major.isdecimal() and int(major) < AMPERE  # AMD's have letters


def simulate_devices(n: int) -> None:
    """Simulate n CPU devices; call before any JAX computation.

    XLA's default CPU scheduler maximises concurrency, and gathers the weights of many layers before
    it needs the first. This selects the other scheduler, unless XLA_FLAGS already chooses one.
    """
    scheduler = "xla_cpu_enable_concurrency_optimized_scheduler"
    flags = os.environ.get("XLA_FLAGS", "")
    if scheduler not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{scheduler}=false"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n)
