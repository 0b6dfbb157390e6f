"""The decode loop of a gated engine (`gate.py`)."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.decoding.gate import Gate
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.decoding.step import Carry, draft, step_of
from medusa_jax.decoding.stopping import RUNNING
from medusa_jax.heads.optional import CopiesText
from medusa_jax.heads.registry import no_drafter
from medusa_jax.sharding import Params, pin_state
from medusa_jax.tree.tree import Tree


def loops(
    engine: Engine, variables: Params, more: Callable[[Carry], jax.Array], carry: Carry
) -> Carry:
    """One loop for each tree, in turn: it runs while the gate chooses its tree.

    Loops change the state in place; the branches of a conditional would copy the cache.
    """
    for index, tree in enumerate(engine.gated):
        own = replace(engine, tree=tree, gated=())
        if not index and not gate_of(carry[1]).follows:
            own = replace(own, drafter=no_drafter(engine.llama.config))

        def chosen(carry: Carry, index: int = index) -> jax.Array:
            return more(carry) & (gate_of(carry[1]).index_1[0] == index)

        def one(carry: Carry, index: int = index, own: Engine = own) -> Carry:
            step, old = carry
            new = step_of(own)(own, variables, old)
            accepted_B: jax.Array | None = None
            if index:
                accepted_B = new.n_new_B - old.n_new_B - 1
            elif isinstance(own.drafter, CopiesText):  # a draft costs nothing: test one
                drafted_BM = draft(own, variables, old, Tree.chain(1)).nodes_BM
                accepted_B = (drafted_BM[:, 1] == new.root_B).astype(jnp.int32)
            running_B = old.status_B == RUNNING
            gate = gate_of(old).after_step(index, accepted_B, running_B, new.length_B)
            return step + 1, pin_state(engine.llama.mesh, new.replace(gate=gate))

        carry = lax.while_loop(chosen, one, carry)
    return carry


def gate_of(state: DecodeState) -> Gate:
    """The gate of a gated engine's state."""
    assert state.gate is not None
    return state.gate
