"""Grouped-query attention in products: the query heads of a group are rows of one product with its keys."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.model.product import at_least_f32


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dot(a: jax.Array, b: jax.Array, axis_b: int) -> jax.Array:
    """The last axis of a [B, G, Q, X] times axis 2 or 3 of b, batched over [B, G], in float32 or wider.

    Its gradient is rounded to their type before it is multiplied.
    """
    return _dot(a, b, 3, axis_b)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=at_least_f32(a.dtype),
    )


def _dot_backward(
    axis_b: int, operands: tuple[jax.Array, jax.Array], d: jax.Array
) -> tuple[jax.Array, jax.Array]:
    a, b = operands
    d = d.astype(a.dtype)
    d_b = _dot(d, a, 2, 2) if axis_b == 3 else _dot(a, d, 2, 2)
    return _dot(d, b, 3, 5 - axis_b).astype(a.dtype), d_b.astype(b.dtype)


dot.defvjp(lambda a, b, axis_b: (dot(a, b, axis_b), (a, b)), _dot_backward)


def fold_queries(x_BGTRX: jax.Array) -> jax.Array:
    """The queries of a group as rows: [B, G, T * R, X]."""
    return x_BGTRX.reshape(*x_BGTRX.shape[:2], -1, x_BGTRX.shape[-1])


def group_queries(q_BTNH: jax.Array, G: int) -> jax.Array:
    """Group queries by their key/value head: [B, G, T, R, H]."""
    B, T, N, H = q_BTNH.shape
    return q_BTNH.reshape(B, T, G, N // G, H).transpose(0, 2, 1, 3, 4)


def flat(out_BGTRH: jax.Array) -> jax.Array:
    """[B, G, T, R, H] -> [B, T, N * H]."""
    B, _, T = out_BGTRH.shape[:3]
    return out_BGTRH.transpose(0, 2, 1, 3, 4).reshape(B, T, -1)


def attend(
    q_BTNH: jax.Array,
    k_BGSH: jax.Array,
    v_BGSH: jax.Array,
    mask_BTS: jax.Array,
    new: tuple[jax.Array, jax.Array] | None = None,
    start_B: jax.Array | None = None,
    keys_first: bool = False,
) -> jax.Array:
    """Grouped-query attention of T queries over S slots; softmax in float32 or wider.

    The N // G query heads of a group are folded into the query rows, which reads keys and values
    once per group.

    Args:
      new: key and value of one new token [B, G, 1, H] for slot `start_B`, not written yet. If they are read
        from the cache after the write, XLA for CPU writes and copies every cache twice, which for longer
        texts costs more than reading the weights.
      start_B: the slot of the new token.
      keys_first: multiply keys times queries (`Kernels.keys_first`).

    Returns: [B, T, N * H].
    """
    B, T, _, H = q_BTNH.shape
    G, S = k_BGSH.shape[1], k_BGSH.shape[2]
    dtype, wide = q_BTNH.dtype, at_least_f32(q_BTNH.dtype)
    # Scaling the queries instead of the scores saves a pass over [.., T, S].
    q_BGTRH = group_queries((q_BTNH.astype(wide) * H**-0.5).astype(dtype), G)
    q_BGQH = fold_queries(q_BGTRH)
    k_BGSH = k_BGSH.astype(dtype)
    if keys_first:
        score_BGQS = jnp.swapaxes(dot(k_BGSH, q_BGQH, 3), 2, 3)
    else:
        score_BGQS = dot(q_BGQH, k_BGSH, 3)
    if new is not None and start_B is not None:
        k_BG1H, v_BG1H = (x.astype(dtype) for x in new)
        diag_B11S = (jnp.arange(S)[None, :] == start_B[:, None])[:, None, None, :]
        score_BGQS = jnp.where(diag_B11S, dot(q_BGQH, k_BG1H, 3), score_BGQS)
    score_BGTRS = score_BGQS.reshape(B, G, T, -1, S)
    score_BGTRS = jnp.where(mask_BTS[:, None, :, None], score_BGTRS, jnp.finfo(wide).min)
    weight_BGQS = fold_queries(jax.nn.softmax(score_BGTRS, axis=-1))
    if new is None:
        out_BGQH = dot(weight_BGQS.astype(dtype), v_BGSH.astype(dtype), 2)
    else:
        diag_BGQ1 = jnp.sum(jnp.where(diag_B11S, weight_BGQS, 0), axis=-1, keepdims=True)
        weight_BGQS = jnp.where(diag_B11S, 0, weight_BGQS)
        out_BGQH = dot(weight_BGQS.astype(dtype), v_BGSH.astype(dtype), 2)
        out_BGQH += diag_BGQ1 * v_BG1H.astype(wide)
    return flat(out_BGQH.astype(dtype).reshape(q_BGTRH.shape))
