"""Single operations of `TpuKernels`: attention, rotation, and writes to the cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.model.masks import CausalMask
from medusa_jax.model.product import at_least_f32

# Slots of a block: the largest that divides the cache.
BLOCKS = (512, 256, 128)
# Rows of a 16-bit tile.
TILE = 16
# Most key/value heads per block, and query rows of all of them: they fit 16 MiB of vector memory (v4).
HEADS = 8
ROWS = 2048
# Vector memory that the kernel may use on chips with more.
VMEM = 64 * 2**20
# Maximum number of query rows per key/value head that fits.
MOST_ROWS = 1024
LOWEST = -1e30


def fits(q_BTNH: jax.Array, k_BGSH: jax.Array) -> bool:
    """Whether the kernel takes these queries and keys: 16 bits, whole tiles."""
    _, T, N, H = q_BTNH.shape
    rows = N // k_BGSH.shape[1] * (T + -T % TILE)
    aligned = k_BGSH.shape[2] % BLOCKS[-1] == 0 and H % 128 == 0 and rows <= MOST_ROWS
    return aligned and q_BTNH.dtype == k_BGSH.dtype == jnp.bfloat16


def attend_tree(
    q_BTNH: jax.Array,
    k_BGSH: jax.Array,
    v_BGSH: jax.Array,
    mask_BTS: jax.Array,
    end_B: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """`grouped.attend` of T queries over the slots before `end`: [B, T, N * H].

    XLA writes the scores of long caches to memory, in float32: at batch 8, 4,096 slots and 64 nodes this
    takes longer than reading the weights. This kernel keeps one block of scores in vector memory, with a
    running softmax, and skips blocks after the last used slot.

    Args:
      mask_BTS: the slots that each query sees, all before `end`.
      end_B: used slots of each row, at least 1.
      interpret: run anywhere, slowly.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    B, T, N, H = q_BTNH.shape
    G, S = k_BGSH.shape[1:3]
    R, pad = N // G, -T % TILE
    size = next(size for size in BLOCKS if S % size == 0)
    Q = R * (T + pad)
    max_groups = max(1, min(HEADS, G, ROWS // Q))
    heads = next(n for n in range(max_groups, 0, -1) if G % n == 0)
    dtype = at_least_f32(q_BTNH.dtype)
    q_BTNH = (q_BTNH.astype(dtype) * H**-0.5).astype(q_BTNH.dtype)
    q_BTNH = jnp.pad(q_BTNH, ((0, 0), (0, pad), (0, 0), (0, 0)))
    # Order the queries of a group by head, then by token: the mask of tokens repeats R times.
    q_BGQH = q_BTNH.reshape(B, T + pad, G, R, H).transpose(0, 2, 3, 1, 4)
    q_BGQH = q_BGQH.reshape(B, G, Q, H)
    mask_BTS = jnp.pad(mask_BTS.astype(jnp.int32), ((0, 0), (0, pad), (0, 0)))

    def used(b: Any, s: Any, end_B: Any) -> Any:
        """The block of step s; steps after the end repeat the last used block."""
        return jnp.minimum(s, (end_B[b] - 1) // size)

    queries = pl.BlockSpec((1, heads, Q, H), lambda b, g, s, end: (b, g, 0, 0))
    keys = pl.BlockSpec(
        (1, heads, size, H), lambda b, g, s, end: (b, g, used(b, s, end), 0)
    )
    masks = pl.BlockSpec((1, T + pad, size), lambda b, g, s, end: (b, 0, used(b, s, end)))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(B, G // heads, S // size),
        in_specs=[queries, keys, keys, masks],
        out_specs=pl.BlockSpec((1, T + pad, heads * R * H), lambda b, g, s, end: (b, 0, g)),
        scratch_shapes=[
            pltpu.VMEM((heads, Q, H), dtype),
            pltpu.VMEM((heads, Q, 1), dtype),
            pltpu.VMEM((heads, Q, 1), dtype),
        ],
    )
    # The output has the layout that the next product reads: heads are whole tiles of columns.
    out_BTD = pl.pallas_call(
        functools.partial(_block, repeats=R),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct((B, T + pad, N * H), q_BTNH.dtype),
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * B * N * (T + pad) * S * H,
            transcendentals=B * N * (T + pad) * S,
            bytes_accessed=2 * k_BGSH.size * k_BGSH.dtype.itemsize,
        ),
        name="attend_tree",
    )(end_B, q_BGQH, k_BGSH, v_BGSH, mask_BTS)
    return out_BTD[:, :T]


def _block(
    end_B: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, sums: Any, top: Any, total: Any,
    repeats: int,
) -> None:  # fmt: skip
    """One block of slots for some heads of a row.

    `sums` adds up values weighted by exp(score - top), `total` these weights; `top` is the largest score.
    """
    from jax.experimental import pallas as pl

    b, s = pl.program_id(0), pl.program_id(2)
    size = k.shape[2]

    @pl.when(s == 0)
    def begin() -> None:
        sums[...] = jnp.zeros_like(sums)
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)

    @pl.when(s * size < end_B[b])
    def score() -> None:
        mask_QS = jnp.concatenate([mask[0] != 0] * repeats, axis=0)
        for h in range(k.shape[1]):
            score_QS = _dot(q[0, h], k[0, h], 1)
            score_QS = jnp.where(mask_QS, score_QS, LOWEST)
            new_Q1 = jnp.maximum(top[h], jnp.max(score_QS, axis=-1, keepdims=True))
            # A fully masked block has score = top, hence weights exp(0) = 1: drop them.
            weight_QS = jnp.where(mask_QS, jnp.exp(score_QS - new_Q1), 0.0)
            scale_Q1 = jnp.exp(top[h] - new_Q1)
            total[h] = total[h] * scale_Q1 + jnp.sum(weight_QS, axis=-1, keepdims=True)
            sums[h] = sums[h] * scale_Q1 + _dot(weight_QS.astype(v.dtype), v[0, h], 0)
            top[h] = new_Q1

    @pl.when(s == pl.num_programs(2) - 1)
    def finish() -> None:
        H, rows = sums.shape[2], out.shape[1]
        for h in range(k.shape[1]):
            # Padded queries see nothing.
            mean_QH = (sums[h] / jnp.maximum(total[h], 1e-30)).astype(out.dtype)
            for r in range(repeats):
                column = (h * repeats + r) * H
                out[0, :, column : column + H] = mean_QH[r * rows : (r + 1) * rows]


def _dot(a: jax.Array, b: jax.Array, of_b: int) -> jax.Array:
    """The product of the last axis of `a` with an axis of `b`, in float32 or wider."""
    precision = lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    return lax.dot_general(
        a,
        b,
        (((1,), (of_b,)), ((), ())),
        precision=precision,
        preferred_element_type=at_least_f32(a.dtype),
    )


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


def rotate(x_BTNH: jax.Array, cos_BT1H: jax.Array, sin_BT1H: jax.Array) -> jax.Array:
    """`Kernels.rotate` by head, as attention reads them, and with the halves swapped by a product.

    Half of 128 lanes is less than a tile, so slicing the halves would change the layout twice. A column of the
    product has one term of weight 1 or -1, which is exact.
    """
    H = x_BTNH.shape[-1]
    swap_HH = np.roll(np.eye(H), H // 2, axis=1)
    swap_HH[H // 2 :] *= -1
    x_BNTH, cos_B1TH, sin_B1TH = (
        x.transpose(0, 2, 1, 3) for x in (x_BTNH, cos_BT1H, sin_BT1H)
    )
    swapped = lax.dot_general(
        x_BNTH,
        jnp.asarray(swap_HH, x_BNTH.dtype),
        (((3,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=cos_BT1H.dtype,
    )
    rotated = x_BNTH.astype(cos_BT1H.dtype) * cos_B1TH + swapped * sin_B1TH
    return rotated.astype(x_BTNH.dtype).transpose(0, 2, 1, 3)


def move(x_BGSH: jax.Array, length_B: jax.Array, path_BL: jax.Array) -> jax.Array:
    """`Kernels.commit` of one array, slot by slot in place.

    With a gather, a TPU would keep the cache in a layout that attention does not read. A path ascends, so no
    slot is overwritten before it is read.
    """
    B, G, _, H = x_BGSH.shape
    zero = jnp.zeros((), length_B.dtype)
    for b in range(B):
        for i in range(1, path_BL.shape[1]):
            row, start = jnp.asarray(b, length_B.dtype), length_B[b]
            at = (row, zero, start + path_BL[b, i].astype(start.dtype), zero)
            slot_1G1H = lax.dynamic_slice(x_BGSH, at, (1, G, 1, H))
            x_BGSH = lax.dynamic_update_slice(
                x_BGSH, slot_1G1H, (row, zero, start + i, zero)
            )
    return x_BGSH


def write_rows(
    cache_BGSH: jax.Array, rows_BGTH: jax.Array, start_B: jax.Array, axis: int
) -> jax.Array:
    """`Kernels.write_rows`, one row after the other.

    Writing several rows at once is a scatter, for which a TPU copies the cache to another layout and
    back in every layer. On a CPU this loop would copy the cache once per row.
    """
    zero = jnp.zeros((), start_B.dtype)
    for b in range(cache_BGSH.shape[0]):
        at = [jnp.asarray(b, start_B.dtype), *[zero] * (cache_BGSH.ndim - 1)]
        at[axis] = start_B[b]
        cache_BGSH = lax.dynamic_update_slice(cache_BGSH, rows_BGTH[b : b + 1], at)
    return cache_BGSH
