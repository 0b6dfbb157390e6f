"""Batches and compiled steps on a mesh: which rows go where, and in which shardings a step keeps its state."""

from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from medusa_jax.console import announced
from medusa_jax.devices.platforms import platform
from medusa_jax.sharding import (
    PyTree,
    batch_sharding,
    local_rows,
    param_shardings,
    replicated,
    shapes_with,
)

# XLA for TPUs splits a product with a kernel that is sharded over fsdp into a loop of one part each (a
# "windowed einsum"). In a training step that multiplies the time of compilation, and the parts of all
# layers are sent for at once, with buffers for float32 sums of each product: research/log/.
TRAINING_OPTIONS: dict[str, dict[str, str | bool]] = {
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
}


def local_numbers(mesh: Mesh, batch_size: int, accumulation: int) -> np.ndarray:
    """Indices, ascending, of the batch's rows that this process passes to `microbatches`."""
    micro = batch_size // accumulation
    starts = micro * np.arange(accumulation)
    return (starts[:, None] + local_rows(mesh, micro)[None, :]).reshape(-1)


def microbatches(mesh: Mesh, batch: dict[str, np.ndarray], accumulation: int) -> PyTree:
    """Host rows of this process -> global arrays [A, B / A, T], rows split over the mesh.

    Args:
      batch: arrays [n, T] of the rows with indices `local_numbers`.
    """
    sharding = batch_sharding(mesh)

    def place(x: np.ndarray) -> jax.Array:
        split = x.reshape(accumulation, -1, *x.shape[1:])
        return jax.make_array_from_process_local_data(sharding, split)

    return jax.tree.map(place, batch)


def batch_shapes(
    mesh: Mesh,
    row: Mapping[str, np.ndarray | jax.ShapeDtypeStruct],
    micro: int,
    accumulation: int,
) -> PyTree:
    """Shapes and placement of a batch [accumulation, micro, ...] of rows like `row`."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.ShapeDtypeStruct(
            (accumulation, micro, *x.shape), x.dtype, sharding=sharding
        )
        for name, x in row.items()
    }


def placed_shapes(mesh: Mesh, tree: PyTree) -> PyTree:
    """Shapes of a state, or of frozen variables, placed as a step takes them.

    Moments are placed like their parameters (their paths have the same end), scalars are replicated.
    """
    return shapes_with(tree, param_shardings(mesh, tree))


def compile_step(
    step: Callable, state: PyTree, frozen: PyTree, batch: PyTree, mesh: Mesh
) -> Compiled:
    """Compile the step; its arguments may be shapes (`placed_shapes`). The state is donated."""
    out = (param_shardings(mesh, state), replicated(mesh))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    with (
        announced("compiling the training step (this can take minutes)"),
        jax.set_mesh(mesh),  # attention is split over it
    ):
        options = TRAINING_OPTIONS.get(platform())
        return jitted.lower(state, frozen, batch).compile(compiler_options=options)
