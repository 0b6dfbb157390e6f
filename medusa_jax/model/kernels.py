"""Which kernel computes attention here: within whole rows, and of new tokens over a cache.

Whole rows: a library's kernel where one fits, else `causal.py`. Neither stores scores, forward or backward;
the library's kernels are faster on their devices. Pieces of a prompt always use `causal.py`: they also attend
to a partly filled cache, and both kernels start the diagonal of their causal mask at the first key.

A cache: on TPUs `tree_kernel.py`, on NVIDIA GPUs cuDNN where scores are large, else `attention.attend`.

MEDUSA_JAX_ATTENTION=own avoids all kernels; =cudnn lets cuDNN attend to all caches.
"""

import functools
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from medusa_jax.console import inform
from medusa_jax.devices.platforms import platform
from medusa_jax.model import tree_kernel
from medusa_jax.model.causal import CausalMask, attend_causal
from medusa_jax.sharding import ROWS

Kernel = Literal["cudnn", "splash", "tree", "own"]

# Longest row for cuDNN, which takes segments as a 16-bit mask [B, 1, T, T] (its layout for packed rows is
# not public): for longer rows the mask would be the largest array.
CUDNN_LONGEST = 8192
# Bytes of scores from which cuDNN attends to caches: on an H100 with 7B heads over 1,024 slots a step takes 0.85
# of the time with 64 MiB (8 rows of 64 nodes), 0.98 with 16 MiB, 1.03 with 8 MiB (research/log/).
CUDNN_SCORES = 2**25
# From this many slots on, those of all rows, a TPU attends to a cache for one token a row by the kernel, too:
# XLA's attention of one row is faster over fewer (research/log/).
ONE_ROW_SLOTS = 8192
SHORT = (jnp.bfloat16, jnp.float16)


def asked() -> str | None:
    """The user's choice: "own", "cudnn" or None."""
    return os.environ.get("MEDUSA_JAX_ATTENTION")


def kernel_for(platform: str, dtype: DTypeLike, T: int, H: int) -> Kernel:
    """The kernel for rows of T tokens and heads of size H.

    Library kernels are for 16-bit types: with float32 they multiply in lower precision or fail.

    Args:
      platform: "cpu", "cuda", "rocm" or "tpu".
    """
    if asked() == "own" or jnp.dtype(dtype) not in SHORT:
        return "own"
    if platform == "cuda" and T % 2 == 0 and T <= CUDNN_LONGEST and H % 8 == 0 and H <= 128:
        return "cudnn"
    if platform == "tpu" and T % 128 == 0 and H % 128 == 0:
        return "splash"
    return "own"


def attend_rows(
    q_BTNH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
) -> jax.Array:
    """Attention within whole rows: [B, T, N * H]; on a mesh every device computes its rows."""
    B, T, _, H = q_BTNH.shape
    mesh = jax.sharding.get_abstract_mesh()
    kernel = kernel_for(platform(), q_BTNH.dtype, T, H)
    # XLA cannot partition a kernel, and without a mesh the placement of rows is unknown.
    n_rows = 1 if mesh.empty else mesh.shape["data"] * mesh.shape["fsdp"]
    if kernel == "own" or (mesh.empty and jax.device_count() > 1) or B % n_rows:
        return attend_causal(q_BTNH, k_BGTH, v_BGTH, mask)
    if kernel == "cudnn" and not has_cudnn():
        return attend_causal(q_BTNH, k_BGTH, v_BGTH, mask)
    run = cudnn if kernel == "cudnn" else splash
    args = (q_BTNH, k_BGTH.swapaxes(1, 2), v_BGTH.swapaxes(1, 2), mask)
    out_BTNH = run(*args) if mesh.empty else on_mesh(run, mesh)(*args)
    return out_BTNH.reshape(B, T, -1)


def cached_kernel(q_BTNH: jax.Array, k_BGSH: jax.Array, T: int) -> Kernel:
    """The kernel for queries over the keys of a cache here, of which T are new in each row."""
    mesh, H = jax.sharding.get_abstract_mesh(), q_BTNH.shape[3]
    # XLA cannot split a kernel.
    several = (jax.device_count() if mesh.empty else mesh.size) > 1
    if asked() == "own" or several or q_BTNH.dtype != k_BGSH.dtype:
        return "own"
    B, queries, N, _ = q_BTNH.shape
    if platform() == "tpu":
        long = T > 1 or B * k_BGSH.shape[2] >= ONE_ROW_SLOTS
        return "tree" if long and tree_kernel.fits(q_BTNH, k_BGSH) else "own"
    many = B * N * queries * k_BGSH.shape[2] * 4 >= CUDNN_SCORES or asked() == "cudnn"
    fits = T > 1 and q_BTNH.dtype in SHORT and H % 8 == 0 and H <= 128
    use = platform() == "cuda" and many and fits and has_cudnn()
    return "cudnn" if use else "own"


@functools.cache
def has_cudnn() -> bool:
    """Whether JAX finds cuDNN; says so once if not. A compiler for GPUs that are not here comes without."""
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


def on_mesh(run: Callable[..., jax.Array], mesh: AbstractMesh) -> Callable[..., jax.Array]:
    """`run` on each device's rows, and on its heads if the tensor axis divides them."""

    def sharded(
        q_BTNH: jax.Array, k_BTGH: jax.Array, v_BTGH: jax.Array, mask: CausalMask
    ) -> jax.Array:
        heads = None if k_BTGH.shape[2] % mesh.shape["tensor"] else "tensor"
        by_head, by_row = P(ROWS, None, heads), P(ROWS)
        split = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(by_head, by_head, by_head, by_row),
            out_specs=by_head,
            check_vma=False,  # kernels do not declare how their results vary
        )
        return split(q_BTNH, k_BTGH, v_BTGH, mask)

    return sharded


def cudnn(
    q_BTNH: jax.Array,
    k_BTGH: jax.Array,
    v_BTGH: jax.Array,
    mask: CausalMask,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """cuDNN's flash attention, [B, T, N, H]; tests pass "xla"."""
    same_B1TT = None
    if mask.segment_ids_BT is not None:
        segment_BT = mask.segment_ids_BT
        same_B1TT = (segment_BT[:, :, None] == segment_BT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BTGH,
        v_BTGH,
        mask=same_B1TT,
        is_causal=True,
        local_window_size=(mask.window - 1, 0) if mask.window else None,
        implementation=implementation,
    )


def cudnn_cached(
    q_BTNH: jax.Array,
    k_BGSH: jax.Array,
    v_BGSH: jax.Array,
    mask_BTS: jax.Array,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """`attention.attend` by cuDNN, [B, T, N * H]; tests pass "xla"."""
    out_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        k_BGSH.swapaxes(1, 2),
        v_BGSH.swapaxes(1, 2),
        mask=mask_BTS[:, None],
        implementation=implementation,
    )
    return out_BTNH.reshape(*q_BTNH.shape[:2], -1)


def splash(
    q_BTNH: jax.Array,
    k_BTGH: jax.Array,
    v_BTGH: jax.Array,
    mask: CausalMask,
    interpret: bool = False,
) -> jax.Array:
    """Splash attention, JAX's kernel for TPUs, [B, T, N, H]; `interpret` runs it on any device."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    _, T, N, H = q_BTNH.shape
    causal: Any = masks.CausalMask((T, T))
    if mask.window:
        causal = masks.LocalMask((T, T), (mask.window - 1, 0), 0)
    size = next(size for size in (512, 256, 128) if T % size == 0)
    sizes: dict[str, Any] = {
        f"block_{side}{pass_}": size
        for side in ("q", "kv")
        for pass_ in ("", "_dq", "_dkv")
    }
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([causal] * N),
        block_sizes=kernels.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )

    def row(
        q_NTH: jax.Array, k_GTH: jax.Array, v_GTH: jax.Array, segment_T: jax.Array | None
    ) -> jax.Array:
        ids = None if segment_T is None else kernels.SegmentIds(segment_T, segment_T)
        return kernel(q_NTH, k_GTH, v_GTH, segment_ids=ids)

    q_BTNH = (q_BTNH * H**-0.5).astype(q_BTNH.dtype)
    q_BNTH, k_BGTH, v_BGTH = (x.swapaxes(1, 2) for x in (q_BTNH, k_BTGH, v_BTGH))
    return jax.vmap(row)(q_BNTH, k_BGTH, v_BGTH, mask.segment_ids_BT).swapaxes(1, 2)
