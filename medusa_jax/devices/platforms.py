"""The platform that a program is traced for, and its compile options for decoding and training."""

import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

R = TypeVar("R")

# XLA for TPUs takes the product of one row with a kernel as multiplications and a sum on the vector
# unit, 2.6 to 3.3 times as many cycles as two rows on the matrix unit by the compiler's estimates.
# On CUDA the host reads the condition of a loop after every step, and the call returns only when the loop
# has ended. As a CUDA graph (WHILE, the rest is XLA's default) the device reads it: research/log/.
OPTIONS: dict[str, dict[str, str | bool]] = {
    "tpu": {"xla_tpu_enable_dot_strength_reduction": False},
    "cuda": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
        "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    },
}
# XLA for TPUs splits a product with a kernel that is sharded over fsdp into a loop of one part each (a
# "windowed einsum"). In a training step that multiplies the time of compilation, and the parts of all
# layers are sent for at once, with buffers for float32 sums of each product: research/log/.
TRAINING_OPTIONS: dict[str, dict[str, str | bool]] = {
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
}


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


def program(
    *, each_step: bool = False, **arguments: Any
) -> Callable[[Callable[..., R]], "Program[R]"]:
    """`jax.jit` with the options of the platform that is active when the program is called.

    Args:
      each_step: called at every step: not kept for later starts, since JAX calls its own programs faster.
      arguments: passed to `jax.jit`, such as `static_argnums`.
    """
    return lambda function: Program(function, arguments, not each_step)


class Program(Generic[R]):
    """A function that is jitted once for each platform.

    Attributes:
      run_kept: a result by a program that is kept for later starts (`programs.py`), or None; None keeps none.
      prepare_kept: begins to read or compile such a program.
      arguments: passed to `jax.jit`.
    """

    run_kept: ClassVar[Callable[..., Any] | None] = None
    prepare_kept: ClassVar[Callable[..., Any] | None] = None

    def __init__(
        self, function: Callable[..., R], arguments: dict[str, Any], may_be_kept: bool
    ) -> None:
        functools.update_wrapper(self, function)
        self.arguments, self._may_be_kept = arguments, may_be_kept
        self._of: Callable[[str], Any] = functools.cache(self.jitted)

    def __call__(self, *args: Any) -> R:
        result = self.run_kept(args) if self._may_be_kept and self.run_kept else None
        return self._of(platform())(*args) if result is None else result

    def prepare(self, *args: Any) -> Any:
        """Begin to read or compile the program for arrays of these shapes: a `programs.Kept`; None where none is kept."""
        if self._may_be_kept and self.prepare_kept:
            return self.prepare_kept(args)
        return None

    def __getattr__(self, name: str) -> Any:
        """Other methods of the jitted function, such as `lower` and `eval_shape`."""
        return getattr(self._of(platform()), name)

    def jitted(self, platform: str, **more: Any) -> Any:
        """The function jitted for a platform, with more arguments."""
        more |= {"compiler_options": OPTIONS.get(platform), **self.arguments}
        return jax.jit(self.__wrapped__, **more)
