"""Attention within whole rows: by a kernel of the library where one fits, else by our own.

The kernels keep no scores, forward or backward, as our own (`causal.py`) does; they are faster on
their devices. Prompts are not whole rows: a piece looks back at a cache of which a part counts,
and both kernels lay the diagonal of their causal mask from the first key, so pieces use our own.

The library's kernels have not run on their devices yet; MEDUSA_JAX_ATTENTION=own goes without them.
"""

import os
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from medusa_jax.model.causal import attend_causal
from medusa_jax.model.online_softmax import Causal
from medusa_jax.platforms import platform
from medusa_jax.sharding import ROWS

Kernel = Literal["cudnn", "splash", "own"]

# Longest row for cuDNN. It takes segments as a mask [B, 1, T, T] in 16 bits only (another layout
# for packed rows is not public), which no other array here is as large as, from here on.
CUDNN_LONGEST = 8192


def kernel_for(platform: str, dtype: Any, T: int, H: int) -> Kernel:
    """The kernel for rows of T tokens and heads of size H.

    Only in 16 bits: in float32 both would multiply in less than that, or not at all.

    Args:
      platform: "cpu", "cuda", "rocm" or "tpu".
    """
    if os.environ.get("MEDUSA_JAX_ATTENTION") == "own":
        return "own"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return "own"
    if platform == "cuda" and T % 2 == 0 and T <= CUDNN_LONGEST and H % 8 == 0 and H <= 128:
        return "cudnn"
    if platform == "tpu" and T % 128 == 0 and H % 128 == 0:
        return "splash"
    return "own"


def attend_rows(
    q_BTNH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, sees: Causal
) -> jax.Array:
    """Attention within whole rows: [B, T, N * H]. On a mesh every device takes its own rows."""
    B, T, _, H = q_BTNH.shape
    mesh = jax.sharding.get_abstract_mesh()
    kernel = kernel_for(platform(), q_BTNH.dtype, T, H)
    # XLA cannot split a kernel. Without a mesh in sight nothing says how rows lie on devices.
    n_rows = 1 if mesh.empty else mesh.shape["data"] * mesh.shape["fsdp"]
    if kernel == "own" or (mesh.empty and jax.device_count() > 1) or B % n_rows:
        return attend_causal(q_BTNH, k_BGTH, v_BGTH, sees)
    run = cudnn if kernel == "cudnn" else splash
    args = (q_BTNH, k_BGTH.swapaxes(1, 2), v_BGTH.swapaxes(1, 2), sees)
    out_BTNH = run(*args) if mesh.empty else on_mesh(run, mesh)(*args)
    return out_BTNH.reshape(B, T, -1)


def on_mesh(run: Any, mesh: Any) -> Any:
    """`run`, for every device on its own rows, and its own heads where they can be parted."""

    def parted(q_BTNH: Any, k_BTGH: Any, v_BTGH: Any, sees: Causal) -> jax.Array:
        heads = None if k_BTGH.shape[2] % mesh.shape["tensor"] else "tensor"
        of_heads, of_rows = P(ROWS, None, heads), P(ROWS)
        split = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(of_heads, of_heads, of_heads, of_rows),
            out_specs=of_heads,
            check_vma=False,  # kernels do not say how their results vary
        )
        return split(q_BTNH, k_BTGH, v_BTGH, sees)

    return parted


def cudnn(
    q_BTNH: jax.Array,
    k_BTGH: jax.Array,
    v_BTGH: jax.Array,
    sees: Causal,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """cuDNN's flash attention, [B, T, N, H]; tests run the same request by XLA."""
    same_B1TT = None
    if sees.segment_ids_BT is not None:
        segment_BT = sees.segment_ids_BT
        same_B1TT = (segment_BT[:, :, None] == segment_BT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BTGH,
        v_BTGH,
        mask=same_B1TT,
        is_causal=True,
        local_window_size=(sees.window - 1, 0) if sees.window else None,
        implementation=implementation,
    )


def splash(
    q_BTNH: jax.Array,
    k_BTGH: jax.Array,
    v_BTGH: jax.Array,
    sees: Causal,
    interpret: bool = False,
) -> jax.Array:
    """Splash attention, JAX's kernel for TPUs, [B, T, N, H]; `interpret` runs it anywhere."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    _, T, N, H = q_BTNH.shape
    seen: Any = masks.CausalMask((T, T))
    if sees.window:
        seen = masks.LocalMask((T, T), (sees.window - 1, 0), 0)
    size = next(size for size in (512, 256, 128) if T % size == 0)
    sizes: dict[str, Any] = {
        f"block_{side}{of}": size for side in ("q", "kv") for of in ("", "_dq", "_dkv")
    }
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([seen] * N),
        block_sizes=kernels.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )

    def row(q_NTH: Any, k_GTH: Any, v_GTH: Any, segment_T: Any) -> Any:
        ids = None if segment_T is None else kernels.SegmentIds(segment_T, segment_T)
        return kernel(q_NTH, k_GTH, v_GTH, segment_ids=ids)

    q_BTNH = (q_BTNH * H**-0.5).astype(q_BTNH.dtype)
    q_BNTH, k_BGTH, v_BGTH = (x.swapaxes(1, 2) for x in (q_BTNH, k_BTGH, v_BTGH))
    return jax.vmap(row)(q_BNTH, k_BGTH, v_BGTH, sees.segment_ids_BT).swapaxes(1, 2)
