"""Models without trained weights: shapes only, or random weights.

The bytes and the time of a step do not depend on the values of the weights. Shapes are enough to
compile a program; random weights, created in the form that decoding reads, are enough to run it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.decoding.generate import power_of_two, slot_ladder
from medusa_jax.decoding.prefill import prefill
from medusa_jax.decoding.sampling import Sampling, row_keys
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.heads.drafter import Backbone, Drafter
from medusa_jax.model.llama import Llama
from medusa_jax.model.placing import abstract_params, place_head, place_part, prepare
from medusa_jax.model.stored import Storage, store
from medusa_jax.sharding import Params, PyTree, make_mesh


def trained_shapes(config: LlamaConfig, drafter: Drafter | None = None) -> Params:
    """Shapes of the parameters as they are trained: {"backbone": ..., "heads": ...}."""
    params = abstract_params(config)
    heads: Params = {}
    if drafter is not None:

        def init(params: Params) -> Params:
            return drafter.init(jax.random.key(0), Backbone(Llama(config), params))

        heads = jax.eval_shape(init, params)
    return {"backbone": params, "heads": heads}


def abstract_variables(
    config: LlamaConfig,
    drafter: Drafter | None,
    dtype: DTypeLike,
    storage: Storage | None = None,
    shards: int = 1,
) -> Params:
    """Shapes of the parameters in decoding form, for a tensor axis of `shards` devices."""

    def placed(params: Params) -> Params:
        heads = jax.tree.map(lambda x: x.astype(dtype), params["heads"])
        backbone = prepare(params["backbone"], config, dtype, shards)
        form = storage or Storage()
        return {"backbone": store(backbone, form), "heads": store(heads, form.of_drafts)}

    return jax.eval_shape(placed, trained_shapes(config, drafter))


def prefill_arguments(
    engine: Engine, variables: Params, batch: int, tokens: int
) -> tuple[PyTree, ...]:
    """The arguments of `prefill` for `batch` prompts of `tokens` tokens, as shapes."""

    def per_row(dtype: DTypeLike, *more: int) -> PyTree:
        return jax.ShapeDtypeStruct((batch, *more), dtype)

    keys = jax.eval_shape(row_keys, per_row(jnp.uint32), per_row(jnp.int32))
    real = per_row(jnp.float32)
    thresholds = {"epsilon_B": real, "delta_B": real}
    sampling = Sampling(real, per_row(jnp.int32), real, real, keys, **thresholds)
    slots = slot_ladder(engine, tokens, tokens)[0]
    ids = per_row(jnp.int32)
    prompt, output = (per_row(jnp.int32, n) for n in (power_of_two(tokens, 1), 64))
    stops = per_row(jnp.int32, 1, 1)
    return engine, slots, variables, prompt, *(ids,) * 3, stops, sampling, output


def abstract_state(
    engine: Engine, variables: Params, tokens: int, batch: int = 1
) -> DecodeState:
    """Shapes of the state after prompts of `tokens` tokens."""
    depth_only, slots, *rest = prefill_arguments(engine, variables, batch, tokens)
    return jax.eval_shape(partial(prefill, depth_only, slots), *rest)


def random_backbone(
    config: LlamaConfig, dtype: DTypeLike, storage: Storage, mesh: Mesh | None = None
) -> Params:
    """Random parameters of the backbone in decoding form.

    Created one entry at a time, as when reading files, so that peak memory is the model and one
    more copy of a layer.
    """
    mesh = mesh or make_mesh((1, 1, 1))
    placed: Params = {}
    for name, shapes in trained_shapes(config)["backbone"].items():
        part = {name: _random(shapes, dtype, len(placed))}
        placed |= place_part(config, part, dtype, mesh, storage)
    return placed


def random_heads(drafter: Drafter, dtype: DTypeLike, storage: Storage) -> Params:
    """Random parameters of draft heads in decoding form, created one entry at a time."""
    placed: Params = {}
    for name, shapes in trained_shapes(drafter.llama, drafter)["heads"].items():
        placed |= place_head({name: _random(shapes, dtype, len(placed))}, storage.of_drafts)
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
