"""Attention kernels outside XLA: cuDNN's on NVIDIA GPUs, splash attention and our own on TPUs.

`attention.py` imports this file on these platforms only. The kernels store no scores. The TPU kernels have not
run on a TPU yet (`model/tpu.py`); cuDNN's have run on an H100 (research/log/).

MEDUSA_JAX_ATTENTION=own disables all.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from medusa_jax.console import inform
from medusa_jax.devices.platforms import default_device
from medusa_jax.model import tpu
from medusa_jax.model.masks import CausalMask
from medusa_jax.sharding import ROWS

# Longest row for cuDNN, which takes segments as a 16-bit mask [B, 1, T, T] (its layout for packed rows is
# not public): for longer rows the mask would be the largest array.
CUDNN_LONGEST = 8192
# From this many slots on, summed over all rows, a TPU also uses the kernel for one token per row: over fewer slots
# XLA's attention of one token is faster (research/log/).
ONE_ROW_SLOTS = 8192
# Least major compute capability of NVIDIA GPUs for cuDNN's attention, and for products in bfloat16: on a T4 (7.5) XLA
# unpacks kernels to float32 in memory before each, five times the bytes.
AMPERE = 8
# Library kernels multiply float32 in lower precision, or fail.
SHORT = (jnp.bfloat16, jnp.float16)

# (queries [B, T, N, H], keys and values [B, G, T, H], mask) -> [B, T, N * H].
OfText = Callable[[jax.Array, jax.Array, jax.Array, CausalMask], jax.Array]
# (queries [B, T, N, H], keys and values [B, G, S, H], mask [B, T, S], used slots [B]) -> [B, T, N * H].
OfCache = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def for_text(platform: str, q_BTNH: jax.Array) -> OfText | None:
    """The kernel for packed rows of this shape, or None."""
    B, T, _, H = q_BTNH.shape
    mesh = jax.sharding.get_abstract_mesh()
    # XLA cannot partition a kernel, and without a mesh the placement of rows is unknown.
    n_rows = 1 if mesh.empty else mesh.shape["data"] * mesh.shape["fsdp"]
    if q_BTNH.dtype not in SHORT or (mesh.empty and jax.device_count() > 1) or B % n_rows:
        return None
    if platform == "tpu" and T % 128 == 0 and H % 128 == 0:
        return partial(by_row, tpu.splash, mesh)
    if (
        platform == "cuda"
        and T % 2 == 0
        and T <= CUDNN_LONGEST
        and H % 8 == 0
        and H <= 128
        and has_cudnn()
    ):
        return partial(by_row, cudnn, mesh)
    return None


def for_cache(
    platform: str, q_BTNH: jax.Array, k_BGSH: jax.Array, T: int
) -> OfCache | None:
    """The kernel for queries over the keys of a cache, T of them new in each row, or None.

    On an H100, cuDNN's was faster only for 8 rows of 64 nodes (research/log/).
    """
    mesh = jax.sharding.get_abstract_mesh()
    several = (jax.device_count() if mesh.empty else mesh.size) > 1
    if several or platform != "tpu" or not tpu.fits(q_BTNH, k_BGSH):
        return None
    long = T > 1 or q_BTNH.shape[0] * k_BGSH.shape[2] >= ONE_ROW_SLOTS
    return tpu.attend_tree if long else None


def before_ampere() -> bool:
    """Whether the default device is an NVIDIA GPU that has neither."""
    major = str(getattr(default_device(), "compute_capability", "")).partition(".")[0]
    return major.isdecimal() and int(major) < AMPERE  # AMD's have letters


@functools.cache
def has_cudnn() -> bool:
    """Whether JAX finds cuDNN, else prints one note, and the GPU is new enough, which JAX does not check.

    Ahead-of-time compilers have no cuDNN.
    """
    if before_ampere():
        return False
    x_BTNH = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(
            partial(jax.nn.dot_product_attention, implementation="cudnn"), *[x_BTNH] * 3
        )
    except RuntimeError:
        inform(
            "cuDNN was not found, so attention is this project's own "
            "(pip install nvidia-cudnn-cu13, or -cu12 with CUDA 12)"
        )
        return False
    return True


def by_row(
    run: Callable[..., jax.Array],
    mesh: AbstractMesh,
    q_BTNH: jax.Array,
    k_BGTH: jax.Array,
    v_BGTH: jax.Array,
    mask: CausalMask,
) -> jax.Array:
    """A kernel on each device's rows, and on its heads if the tensor axis divides them: [B, T, N * H]."""
    given = q_BTNH, k_BGTH.swapaxes(1, 2), v_BGTH.swapaxes(1, 2), mask
    if not mesh.empty:
        heads = None if k_BGTH.shape[1] % mesh.shape["tensor"] else "tensor"
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(*[P(ROWS, None, heads)] * 3, P(ROWS)),
            out_specs=P(ROWS, None, heads),
            check_vma=False,  # kernels do not declare how their results vary over devices
        )
    return run(*given).reshape(*q_BTNH.shape[:2], -1)


def cudnn(
    q_BTNH: jax.Array,
    k_BTGH: jax.Array,
    v_BTGH: jax.Array,
    mask: CausalMask,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """cuDNN's flash attention of a text, [B, T, N, H]; tests pass "xla"."""
    same_B1TT = None
    if mask.segment_ids_BT is not None:
        segment_BT = mask.segment_ids_BT
        same_B1TT = (segment_BT[:, :, None] == segment_BT[:, None, :])[:, None]
    window = (mask.window - 1, 0) if mask.window else None
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTGH, v_BTGH, mask=same_B1TT, is_causal=True, local_window_size=window,
        implementation=implementation,
    )  # fmt: skip
