"""Kernels for NVIDIA GPUs: cuDNN's attention, and forms that XLA's libraries run faster.

The numbers are measurements on an H100 (research/log/). cuDNN's attention over a cache was faster only for
8 rows of 64 nodes, so decoding does not use it.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.console import inform
from medusa_jax.devices.platforms import before_ampere
from medusa_jax.kernels.by_row import SHORT, by_row, takes_rows
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.masks import CausalMask
from medusa_jax.model.product import product

# Longest row for cuDNN, which takes segments as a 16-bit mask [B, 1, T, T] (its layout for packed rows is
# not public): for longer rows the mask would be the largest array.
CUDNN_LONGEST = 8192
# XLA for CUDA computes the product of one row as multiplications and a sum, which leaves an H100's memory idle
# for up to two thirds of the time. A matrix product of 8 rows in 16 bits is faster.
PRODUCT_ROWS = 8
# Find the best in two stages (parts, then their best) up to this many rows, in parts at least this wide.
TOP_K_PARTS, TOP_K_ROWS, TOP_K_WIDTH = 128, 32, 64


@dataclass(frozen=True)
class CudaKernels(Kernels):
    """XLA's best forms on NVIDIA GPUs, and cuDNN's attention.

    Attributes:
      cudnn: attention of packed rows in 16 bits may be cuDNN's.
    """

    cudnn: bool = True

    def attend_text(
        self, q_BTNH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
    ) -> jax.Array:
        if not (self.cudnn and cudnn_takes(q_BTNH) and has_cudnn()):
            return super().attend_text(q_BTNH, k_BGTH, v_BGTH, mask)
        return by_row(cudnn_attention, q_BTNH, k_BGTH, v_BGTH, mask)

    def product(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """One row in 16 bits as a matrix product of `PRODUCT_ROWS`."""
        return product(x, kernel, PRODUCT_ROWS if x.dtype in SHORT else 1)

    def top_k(self, scores_RO: jax.Array, n: int) -> jax.Array:
        """Top k in two stages: XLA's TopK runs a row in one block of threads. For four rows of 128,256 scores that
        takes an H100 three times as long as the best of 128 parts followed by the best of these."""
        R, O = scores_RO.shape
        width = -(-O // TOP_K_PARTS)
        if R > TOP_K_ROWS or width < max(n, TOP_K_WIDTH):
            return super().top_k(scores_RO, n)
        minus_inf = jnp.asarray(-jnp.inf, scores_RO.dtype)
        padded = lax.pad(scores_RO, minus_inf, ((0, 0, 0), (0, width * TOP_K_PARTS - O, 0)))
        best, at = lax.top_k(padded.reshape(R * TOP_K_PARTS, width), n)
        first_1P1 = (jnp.arange(TOP_K_PARTS, dtype=at.dtype) * width)[None, :, None]
        column_RC = (at.reshape(R, TOP_K_PARTS, n) + first_1P1).reshape(R, -1)
        return jnp.take_along_axis(column_RC, lax.top_k(best.reshape(R, -1), n)[1], axis=1)


def cudnn_takes(q_BTNH: jax.Array) -> bool:
    """Whether cuDNN's attention takes packed rows of this shape and type on the devices in sight."""
    _, T, _, H = q_BTNH.shape
    fits = T % 2 == 0 and T <= CUDNN_LONGEST and H % 8 == 0 and H <= 128
    return fits and takes_rows(q_BTNH)


@functools.cache
def has_cudnn() -> bool:
    """Whether JAX finds cuDNN, else prints one note, and the GPU is new enough, which JAX does not check.

    Ahead-of-time compilers have no cuDNN.
    """
    if before_ampere():
        return False
    x_BTNH = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(attend, *[x_BTNH] * 3)
    except RuntimeError:
        inform(
            "cuDNN was not found, so attention is this project's own "
            "(pip install nvidia-cudnn-cu13, or -cu12 with CUDA 12)"
        )
        return False
    return True


def cudnn_attention(
    q_BTNH: jax.Array,
    k_BTGH: jax.Array,
    v_BTGH: jax.Array,
    mask: CausalMask,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """cuDNN's flash attention of a text, [B, T, N, H]; tests pass "xla"."""
    segment_mask_B1TT = None
    if mask.segment_ids_BT is not None:
        segment_BT = mask.segment_ids_BT
        segment_mask_B1TT = (segment_BT[:, :, None] == segment_BT[:, None, :])[:, None]
    window = (mask.window - 1, 0) if mask.window else None
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTGH, v_BTGH, mask=segment_mask_B1TT, is_causal=True, local_window_size=window,
        implementation=implementation,
    )  # fmt: skip
