"""Devices to compile for: the default one of this process, or accelerators that are not here.

libtpu compiles for TPUs and the CUDA plugin for NVIDIA GPUs on any Linux machine
(`jax.experimental.topologies`): the programs are the real ones, but they cannot be run.
"""

import os
from dataclasses import dataclass
from typing import Any

from medusa_jax.devices.chips import CHIPS, Chip
from medusa_jax.devices.platforms import default_device, platform
from medusa_jax.errors import UserError, did_you_mean

# Topologies to compile for where only the generation is given.
SMALLEST = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}
# The compiler of GPUs is given the device's limits. H100 SXM: NVIDIA's whitepaper and CUDA's
# table of compute capability 9.0; names are those of XLA's `GpuTargetConfigProto`.
H100 = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 * 1024,
    "shared_memory_per_block_optin": 227 * 1024,
    "shared_memory_per_core": 228 * 1024,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "memory_bandwidth": 3352 * 10**9,
    "l2_cache_size": 50 * 2**20,
    "clock_rate_ghz": 1.98,
    "device_memory_size": 80 * 2**30,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
}
CUDNN = "major: 9 minor: 10 patch: 0"
# libtpu would look for the TPU's host; and several processes may compile at once.
NO_HOST = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
HERE = "here"
NAMES = (*SMALLEST, "h100", HERE)
# Distributions of the compilers; JAX takes the first that is installed.
COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}


@dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
      name: generation and topology, such as "v5e:2x2"; "h100"; or "here".
      chip: its peaks; 0 for the device of this process.
      devices: for `make_mesh`; those that are not here cannot run anything.
      compiler: the compiler's package and version.
      platform: as `devices.platforms.platform` names it.
    """

    name: str
    chip: Chip
    devices: tuple[Any, ...]
    compiler: str
    platform: str

    @property
    def title(self) -> str:
        """The name; of what is here, the device's as well."""
        return f"{self.name} ({self.chip.title})" if self.name == HERE else self.name


def find_target(name: str) -> Target:
    """The devices that a name such as v5e:2x2, v6e, h100 or here stands for.

    Raises:
      UserError: an unknown name or topology, or a compiler that is not installed.
    """
    kind, _, topology = name.partition(":")
    if kind not in NAMES or (kind not in SMALLEST and topology):
        hint = did_you_mean(kind, NAMES)
        raise UserError(
            f"--for is here, h100, or one of {', '.join(SMALLEST)} with a topology such as "
            f"v5e:2x2, not {name!r}{hint}"
        )
    if kind == HERE:
        return _here()
    if kind == "h100":
        compiler = _version("cuda")
        return Target(name, CHIPS["h100"], _gpu(), compiler, "cuda")
    name, compiler = f"{kind}:{topology or SMALLEST[kind]}", _version("tpu")
    return Target(name, CHIPS[f"tpu-{kind}"], _tpu(name), compiler, "tpu")


def _here() -> Target:
    """The default device of this process, and the others of its platform after it."""
    import jax
    import jaxlib

    first = default_device()
    devices = [d for d in jax.local_devices(backend=first.platform) if d != first]
    memory = (first.memory_stats() or {}).get("bytes_limit", 0)
    chip = Chip(first.device_kind, 0, 0, memory, 0)
    version = first.client.platform_version.splitlines()[0]
    compiler = f"jaxlib {jaxlib.__version__} ({version})"
    return Target(HERE, chip, (first, *devices), compiler, platform())


def _tpu(name: str) -> tuple[Any, ...]:
    for variable, value in NO_HOST.items():
        os.environ.setdefault(variable, value)
    # Otherwise each of a v4 chip's two cores is a device, and `make_mesh` fails.
    chip = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    return _topology(name, platform="tpu", topology_name=name, **chip)


def _gpu() -> tuple[Any, ...]:
    limits = "\n".join(f"  {key}: {value}" for key, value in H100.items())
    config = (
        f"gpu_device_info {{\n{limits}\n  cuda_compute_capability {{ major: 9 minor: 0 }}\n}}\n"
        f'platform_name: "CUDA"\ndnn_version_info {{ {CUDNN} }}\n'
        'device_description_str: "NVIDIA H100 80GB HBM3"\n'
    )
    return _topology(
        "h100", platform="cuda", topology_name="1x1x1", topology="1x1x1",
        target_config=config,
    )  # fmt: skip


def _topology(name: str, **arguments: Any) -> tuple[Any, ...]:
    from jax.experimental import topologies

    try:
        return tuple(topologies.get_topology_desc(**arguments).devices)
    except Exception as error:  # the plugins raise what they like
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot compile for {name}: {reason}") from error


def _version(platform: str) -> str:
    """The compiler's package and version.

    Raises:
      UserError: none is installed.
    """
    from importlib import metadata

    for package in COMPILERS[platform]:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    raise UserError(
        f"the compiler for {platform} is not here: pip install --target DIR '.[aot]' in the clone, then set "
        "PYTHONPATH=DIR"
    )
