"""The decode loop of a gated engine (`gate.py`)."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.decoding.gate import Gate, follows_free
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.decoding.stopping import RUNNING
from medusa_jax.heads.drafter import Backbone, DraftRequest, Ranked
from medusa_jax.heads.registry import no_drafter
from medusa_jax.sharding import Params, pin_state
from medusa_jax.tree.tree import Tree

# Steps taken, and the rows.
Carry = tuple[jax.Array, DecodeState]
Step = Callable[[Engine, Params, DecodeState], DecodeState]


def loops(
    engine: Engine,
    variables: Params,
    more: Callable[[Carry], jax.Array],
    step_of: Callable[[Engine], Step],
    carry: Carry,
) -> Carry:
    """One loop for each tree, in turn: it runs while the gate chooses its tree.

    Loops change the state in place; the branches of a conditional would copy the cache.
    """
    watches = engine.drafter.copies  # its guesses cost nothing
    for size, tree in enumerate(engine.gated):
        own = replace(engine, tree=tree, gated=())
        if size == 0 and not follows_free(engine.drafter):
            own = replace(own, drafter=no_drafter(engine.llama.config))

        def chosen(carry: Carry, size: int = size) -> jax.Array:
            return more(carry) & (gate_of(carry[1]).size_1[0] == size)

        def one(carry: Carry, size: int = size, own: Engine = own) -> Carry:
            step, old = carry
            watched = watches and size == 0
            guess_B = guess(engine, variables, old) if watched else None
            new = step_of(own)(own, variables, old)
            right_B = new.n_new_B - old.n_new_B - 1
            if guess_B is not None:
                right_B = (guess_B == new.root_B).astype(jnp.int32)
            running_B = old.status_B == RUNNING
            gate = gate_of(old).after_step(size, right_B, running_B, new.length_B, watched)
            return step + 1, pin_state(engine.llama.mesh, new.replace(gate=gate))

        carry = lax.while_loop(chosen, one, carry)
    return carry


def gate_of(state: DecodeState) -> Gate:
    """The gate of a gated engine's state."""
    assert state.gate is not None
    return state.gate


def guess(engine: Engine, variables: Params, state: DecodeState) -> jax.Array:
    """The first draft after each root [B]."""
    backbone = Backbone(engine.llama, variables["backbone"])
    request = DraftRequest(state.root_B, Tree.chain(1), lambda _, x: Ranked(x, x))
    filled = engine.drafter.propose(variables["heads"], backbone, state.drafter, request)
    return filled.nodes_BM[:, 1]
