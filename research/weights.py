"""Models without trained weights: shapes, enough to compile a program, and random weights, enough to time it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.api.form import Form
from medusa_jax.arch import LlamaConfig
from medusa_jax.decoding.prefill import PromptArrays, prefill
from medusa_jax.decoding.request import DecodeRequest, prompt_arrays
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.heads import vocabulary
from medusa_jax.heads.drafter import Drafter
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.convert import abstract_params, place_head, place_part, prepare, store
from medusa_jax.model.kernels import PLAIN, Kernels
from medusa_jax.model.llama import Llama
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import Params, make_mesh


def trained_shapes(config: LlamaConfig, drafter: Drafter | None = None) -> Params:
    """Shapes of the parameters as they are trained: {"backbone": ..., "heads": ...}."""
    params = abstract_params(config)
    heads: Params = {}
    if drafter is not None:

        def init(params: Params) -> Params:
            backbone = Backbone(Llama(config), params)
            narrow = vocabulary.stand_in(backbone, drafter.heads)
            return drafter.init(jax.random.key(0), narrow)

        heads = jax.eval_shape(init, params)
    return {"backbone": params, "heads": heads}


def abstract_variables(
    config: LlamaConfig,
    drafter: Drafter | None,
    dtype: DTypeLike,
    storage: Storage | None = None,
    shards: int = 1,
    kernels: Kernels = PLAIN,
) -> Params:
    """Shapes of the parameters in decoding form, for a tensor axis of `shards` devices."""

    def placed(params: Params) -> Params:
        heads = jax.tree.map(lambda x: x.astype(dtype), params["heads"])
        if drafter and drafter.heads.draft_vocab:
            ids_O = jnp.arange(drafter.heads.draft_vocab, dtype=jnp.int32)
            heads[vocabulary.GROUP] = {"ids": ids_O}
            if drafter.heads.lm_head == "shared":
                kernel_DO = vocabulary.scored_columns(config, params["backbone"], ids_O)
                kernel = {"kernel": kernel_DO.astype(dtype)}
                heads[vocabulary.GROUP]["lm_head"] = kernel
        backbone = prepare(params["backbone"], config, dtype, shards)
        form = storage or Storage()
        return {
            "backbone": store(backbone, form, kernels),
            "heads": store(heads, form.of_drafts, kernels),
        }

    return jax.eval_shape(placed, trained_shapes(config, drafter))


def abstract_prompts(engine: Engine, batch: int, tokens: int) -> tuple[int, PromptArrays]:
    """Slots of the first cache for `batch` prompts of `tokens` tokens, and the prompts as shapes."""
    request = DecodeRequest([[0] * tokens] * batch, [1] * batch)
    cache_sizes, prompts = prompt_arrays(engine, request)
    return cache_sizes[0], jax.eval_shape(lambda arrays: arrays, prompts)


def abstract_state(
    engine: Engine, variables: Params, tokens: int, batch: int = 1
) -> DecodeState:
    """Shapes of the state after prompts of `tokens` tokens."""
    slots, prompts = abstract_prompts(engine, batch, tokens)
    return prefill.eval_shape(engine.depth_only, slots, variables, prompts)


def plain_form(dtype: np.dtype, mesh: Mesh, head_dim: int) -> Form:
    """All in one type and kernels as arrays, with the fastest operations for these."""
    return Form(dtype.name, dtype, Storage(), choose_kernels(mesh, None, head_dim))


def random_backbone(
    config: LlamaConfig, dtype: DTypeLike, storage: Storage, mesh: Mesh | None = None
) -> Params:
    """Random parameters of the backbone in decoding form.

    Created one entry at a time, as when reading files, so that peak memory is the model and one
    more copy of a layer.
    """
    mesh = mesh or make_mesh((1, 1, 1))
    params: Params = {}
    for name, shapes in trained_shapes(config)["backbone"].items():
        part = {name: _random(shapes, dtype, len(params))}
        params |= place_part(config, part, dtype, mesh, storage, PLAIN)
    return params


def random_heads(drafter: Drafter, dtype: DTypeLike, storage: Storage) -> Params:
    """Random parameters of draft heads in decoding form, created one entry at a time."""
    params: Params = {}
    for name, shapes in trained_shapes(drafter.llama, drafter)["heads"].items():
        part = {name: _random(shapes, dtype, len(params))}
        params |= place_head(part, storage.of_drafts, PLAIN)
    return params


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
