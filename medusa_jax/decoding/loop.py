"""Decode steps in one loop on the device."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.decoding.gated import caught_up, gated_step, no_positions
from medusa_jax.decoding.state import DecodeState, Engine, Progress, progress_of
from medusa_jax.decoding.step import decode_step
from medusa_jax.decoding.stopping import PAUSED, RUNNING
from medusa_jax.heads.drafter import Committed
from medusa_jax.programs import program
from medusa_jax.sharding import Params, on_all, pin_state

# Steps without a limit.
FOREVER = np.iinfo(np.int32).max
# Steps taken, the rows, and what the drafter of a gated engine has not read.
Carry = tuple[jax.Array, DecodeState, Committed | None]


@program(static_argnums=(0, 4), donate_argnums=2)
def decode_loop(
    engine: Engine,
    variables: Params,
    state: DecodeState,
    chunk_steps: jax.Array,
    until_one_ends: bool = False,
) -> tuple[DecodeState, Progress]:
    """Run up to `chunk_steps` steps, until no row runs or one that has not ended lacks slots.

    Compiled once per cache size: the cost of a step depends on the slots, so the drivers grow the
    cache with the text.

    Args:
      until_one_ends: return as soon as a row ends.
    """
    slots, R = state.cache.slots, engine.free_slots
    began_B = state.status_B == RUNNING

    def more(step: jax.Array, state: DecodeState) -> jax.Array:
        running_B = state.status_B == RUNNING
        # Steps write R slots of paused rows too, after their text.
        alive_B = running_B | (state.status_B == PAUSED)
        fits = jnp.max(jnp.where(alive_B, state.length_B, 0)) + R <= slots
        go_on = jnp.any(running_B)
        if until_one_ends:
            go_on &= jnp.all(running_B == began_B)
        return (step < chunk_steps) & go_on & fits

    def one(carry: Carry) -> Carry:
        step, state, deferred = carry
        if state.host_1 is not None:
            # Only for constraints.
            from medusa_jax.decoding.constrained_step import host_step

            state = host_step(engine, variables, state)
        elif deferred is None:
            state = decode_step(engine, variables, state)
        else:
            after = gated_step(
                engine, variables, state, deferred, lambda n, state: more(step + n, state)
            )
            return step + after.taken, after.state, after.deferred
        return step + 1, pin_state(engine.llama.mesh, state), deferred

    deferred = no_positions(engine, state) if engine.gated else None
    start = jnp.zeros((), jnp.int32), state, deferred
    _, state, deferred = lax.while_loop(lambda carry: more(*carry[:2]), one, start)
    if deferred is not None:
        state, _ = caught_up(engine, variables, state, deferred, jnp.array(True))
    state = pin_state(engine.llama.mesh, state)
    progress = jax.tree.map(jnp.copy, progress_of(state))
    return state, on_all(engine.llama.mesh, progress)
