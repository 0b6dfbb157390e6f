"""Models without weights: shapes, which are enough to compile a program."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.decoding import generate as loop
from medusa_jax.decoding.prefill import prefill
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.heads import vocabulary
from medusa_jax.heads.drafter import Backbone, Drafter
from medusa_jax.model.kernels import PLAIN, Kernels
from medusa_jax.model.llama import Llama
from medusa_jax.model.placing import abstract_params, prepare, store
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import Params, PyTree


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


def prefill_arguments(
    engine: Engine, variables: Params, batch: int, tokens: int
) -> tuple[PyTree, ...]:
    """The arguments of `prefill` for `batch` prompts of `tokens` tokens, as shapes."""
    request = loop.Request([[0] * tokens] * batch, [1] * batch)
    ladder, (_, *rest) = loop.prefill_arguments(engine, variables, request)
    return engine, ladder[0], variables, *jax.eval_shape(lambda *given: given, *rest)


def abstract_state(
    engine: Engine, variables: Params, tokens: int, batch: int = 1
) -> DecodeState:
    """Shapes of the state after prompts of `tokens` tokens."""
    depth_only, slots, *rest = prefill_arguments(engine, variables, batch, tokens)
    return prefill.eval_shape(depth_only, slots, *rest)
