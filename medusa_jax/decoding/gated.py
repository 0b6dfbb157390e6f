"""The decode step of a gated engine (`gate.py`)."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.decoding.step import draft, step_of
from medusa_jax.decoding.stopping import RUNNING
from medusa_jax.heads.optional import CopiesText
from medusa_jax.sharding import Params, pin_state
from medusa_jax.tree.tree import Tree


class StepResult(NamedTuple):
    """A state and what its last step tested.

    Attributes:
      waits: the step has not been taken yet.
      accepted_B, levels: as for `Gate.after_step`.
    """

    state: DecodeState
    waits: jax.Array
    accepted_B: jax.Array
    levels: jax.Array


def gated_step(engine: Engine, variables: Params, state: DecodeState) -> DecodeState:
    """A step with the size that the gate has chosen, which then chooses the next one.

    There is one loop for each size, and the loop of the chosen one runs once: loops change the state
    in place, while the branches of a conditional would copy the cache. Plain steps keep the
    drafter's state up to date, so that any step may draft.
    """
    gate = state.gate
    assert gate is not None
    chosen, running_B = gate.index_1[0], state.status_B == RUNNING
    waits, levels = jnp.array(True), jnp.zeros((), jnp.int32)
    result = StepResult(state, waits, jnp.zeros_like(state.n_new_B), levels)
    for index, tree in enumerate(engine.gated):
        sized = replace(engine, tree=tree, gated=())

        def is_chosen(carry: StepResult, index: int = index) -> jax.Array:
            return carry.waits & (chosen == index)

        def one_step(carry: StepResult, sized: Engine = sized) -> StepResult:
            return step_with(sized, variables, carry.state)

        result = lax.while_loop(is_chosen, one_step, result)
    gate = gate.after_step(result.accepted_B, result.levels, running_B)
    return result.state.replace(gate=gate)


def step_with(engine: Engine, variables: Params, old: DecodeState) -> StepResult:
    """A step with the engine's tree."""
    new = step_of(engine)(engine, variables, old)
    accepted_B, levels = jnp.maximum(new.n_new_B - old.n_new_B - 1, 0), engine.tree.depth
    if not levels and isinstance(engine.drafter, CopiesText):
        # A draft costs nothing: test one.
        drafted_BM = draft(engine, variables, old, Tree.chain(1)).nodes_BM
        accepted_B = (drafted_BM[:, 1] == new.root_B).astype(jnp.int32)
        levels = 1
    new = pin_state(engine.llama.mesh, new)
    return StepResult(new, jnp.array(False), accepted_B, jnp.array(levels, jnp.int32))
