"""Accelerators to compile for without having them.

libtpu compiles for TPUs and the CUDA plugin for NVIDIA GPUs on any Linux machine
(`jax.experimental.topologies`): the programs are the real ones, but they cannot be run.
"""

import os
from dataclasses import dataclass
from typing import Any

from medusa_jax.devices.chips import CHIPS, Chip
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
NAMES = (*SMALLEST, "h100")
MISSING = {
    "tpu": "pip install 'libtpu==0.0.42.*'",
    "cuda": "pip install --no-deps jax-cuda12-plugin=={jax} jax-cuda12-pjrt=={jax} "
    "nvidia-cuda-nvcc-cu12",
}


@dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
      name: generation and topology, such as "v5e:2x2"; or "h100".
      chip: its peaks.
      devices: what `make_mesh` takes; they cannot run anything.
      compiler: the compiler's package and version.
    """

    name: str
    chip: Chip
    devices: tuple[Any, ...]
    compiler: str

    @property
    def platform(self) -> str:
        """As `devices.platforms.platform` names it."""
        return "tpu" if self.chip.clock else "cuda"

    @property
    def bytes_per_cycle(self) -> float:
        """Bytes between memory and chip in one cycle at peak bandwidth; 0 without a clock."""
        return self.chip.bandwidth / self.chip.clock if self.chip.clock else 0.0

    @property
    def flops_per_cycle(self) -> float:
        """FLOPs in one cycle at peak; 0 without a clock."""
        return self.chip.flops / self.chip.clock if self.chip.clock else 0.0


def find_target(name: str) -> Target:
    """The devices that a name such as v5e:2x2, v6e or h100 stands for.

    Raises:
      UserError: an unknown name or topology, or a compiler that is not installed.
    """
    kind, _, topology = name.partition(":")
    if kind not in NAMES or (kind == "h100" and topology):
        near = did_you_mean(kind, NAMES)
        raise UserError(
            f"--for is h100, or one of {', '.join(SMALLEST)} with a topology such as "
            f"v5e:2x2, not {name!r}{near}"
        )
    if kind == "h100":
        return Target(name, CHIPS["h100"], _gpu(), _version("jax_cuda12_pjrt", "cuda"))
    name = f"{kind}:{topology or SMALLEST[kind]}"
    return Target(name, CHIPS[f"tpu-{kind}"], _tpu(name), _version("libtpu", "tpu"))


def _tpu(name: str) -> tuple[Any, ...]:
    _version("libtpu", "tpu")
    for variable, value in NO_HOST.items():
        os.environ.setdefault(variable, value)
    # Otherwise each of a v4 chip's two cores is a device, of which no mesh can be made.
    chip = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    return _topology(name, platform="tpu", topology_name=name, **chip)


def _gpu() -> tuple[Any, ...]:
    _version("jax_cuda12_pjrt", "cuda")
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


def _version(package: str, platform: str) -> str:
    """The compiler's package and version.

    Raises:
      UserError: it is not installed; says how to.
    """
    from importlib import metadata

    try:
        return f"{package.replace('_', '-')} {metadata.version(package)}"
    except metadata.PackageNotFoundError as error:
        import jax

        line = MISSING[platform].format(jax=jax.__version__)
        raise UserError(f"the compiler for {platform} is not here: {line}") from error
