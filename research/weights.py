"""Random weights in the form that decoding reads: the time of a step does not depend on their values."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.api.weightless import trained_shapes
from medusa_jax.arch import LlamaConfig
from medusa_jax.heads.drafter import Drafter
from medusa_jax.model.kernels import PLAIN, Kernels
from medusa_jax.model.placing import place_head, place_part
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import Params, make_mesh


def random_backbone(
    config: LlamaConfig,
    dtype: DTypeLike,
    storage: Storage,
    mesh: Mesh | None = None,
    kernels: Kernels = PLAIN,
) -> Params:
    """Random parameters of the backbone in decoding form.

    Created one entry at a time, as when reading files, so that peak memory is the model and one
    more copy of a layer.
    """
    mesh = mesh or make_mesh((1, 1, 1))
    placed: Params = {}
    for name, shapes in trained_shapes(config)["backbone"].items():
        part = {name: _random(shapes, dtype, len(placed))}
        placed |= place_part(config, part, dtype, mesh, storage, kernels)
    return placed


def random_heads(
    drafter: Drafter, dtype: DTypeLike, storage: Storage, kernels: Kernels = PLAIN
) -> Params:
    """Random parameters of draft heads in decoding form, created one entry at a time."""
    placed: Params = {}
    for name, shapes in trained_shapes(drafter.llama, drafter)["heads"].items():
        part = {name: _random(shapes, dtype, len(placed))}
        placed |= place_head(part, storage.of_drafts, kernels)
    return placed


def _random(shapes: Params, dtype: DTypeLike, seed: int) -> Params:
    leaves, kind = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        kind, [_leaf(k, x.shape, dtype) for k, x in zip(keys, leaves)]
    )


@partial(jax.jit, static_argnums=(1, 2))
def _leaf(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """A norm-preserving random kernel; ones for scales and biases."""
    if len(shape) < 2:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[0] ** -0.5, dtype)
