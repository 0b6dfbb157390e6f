"""Attention kernels of libraries over packed rows, on each device's rows and heads."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from medusa_jax.model.masks import CausalMask
from medusa_jax.sharding import ROWS

# Library kernels multiply float32 in lower precision, or fail.
SHORT = (jnp.bfloat16, jnp.float16)


def takes_rows(q_BTNH: jax.Array) -> bool:
    """Whether the devices in sight can run a kernel on their rows: XLA cannot partition it, and without a mesh
    the placement of rows is unknown."""
    mesh = jax.sharding.get_abstract_mesh()
    if q_BTNH.dtype not in SHORT or (mesh.empty and jax.device_count() > 1):
        return False
    n_rows = 1 if mesh.empty else mesh.shape["data"] * mesh.shape["fsdp"]
    return q_BTNH.shape[0] % n_rows == 0


def by_row(
    run: Callable[..., jax.Array],
    q_BTNH: jax.Array,
    k_BGTH: jax.Array,
    v_BGTH: jax.Array,
    mask: CausalMask,
) -> jax.Array:
    """A kernel on each device's rows, and on its heads if the tensor axis divides them: [B, T, N * H].

    Args:
      run: (queries, keys, values [B, T, heads, H], mask) -> [B, T, N, H].
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        heads = None if k_BGTH.shape[1] % mesh.shape["tensor"] else "tensor"
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(*[P(ROWS, None, heads)] * 3, P(ROWS)),
            out_specs=P(ROWS, None, heads),
            check_vma=False,  # kernels do not declare how their results vary over devices
        )
    out_BTNH = run(q_BTNH, k_BGTH.swapaxes(1, 2), v_BGTH.swapaxes(1, 2), mask)
    return out_BTNH.reshape(*q_BTNH.shape[:2], -1)
