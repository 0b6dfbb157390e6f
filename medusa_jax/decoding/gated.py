"""The decode step of a gated engine (`gate.py`).

Plain steps draft nothing, so the drafter need not read their positions at once: they are *deferred*, and the
drafter reads up to `DEFERRED` of them in one pass, at the latest before a step that drafts.

If the whole tree is copied from the text, a step knows how long its match is. If that is below `REPEATS`, the step is
plain and the gate does not count it.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.decoding.copies import REPEATS, copied_tokens
from medusa_jax.decoding.state import DEFERRED, DecodeState, Engine
from medusa_jax.decoding.step import decode_step
from medusa_jax.decoding.stopping import RUNNING
from medusa_jax.heads.drafter import Committed, Drafter, NoDrafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.sharding import Params, PyTree, pin_state

# (steps taken, the state after them) -> whether there is another step to take.
More = Callable[[jax.Array, DecodeState], jax.Array]


@dataclasses.dataclass(frozen=True)
class Deferring(NoDrafter):
    """Takes the drafter's place in a plain step, and returns the position for the drafter to read later.

    Attributes:
      drafter: the one that it stands in for.
    """

    drafter: Drafter

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    def commit(
        self, params: Params, backbone: Backbone, state: PyTree, new: Committed
    ) -> Committed:
        return new


class StepResult(NamedTuple):
    """A state and what its last step tested.

    Attributes:
      deferred: positions that the drafter has not read.
      taken: number of steps.
      accepted_B, levels: as for `Gate.after_step`.
    """

    state: DecodeState
    deferred: Committed
    taken: jax.Array
    accepted_B: jax.Array
    levels: jax.Array


def no_positions(engine: Engine, state: DecodeState) -> Committed:
    """Room for deferred positions, none of them valid."""
    llama, B = engine.llama, len(state.length_B)
    width = (1 + len(llama.taps)) * llama.config.d_model
    zeros_BT = jnp.zeros((B, DEFERRED), jnp.int32)
    hidden_BTE = jnp.zeros((B, DEFERRED, width), llama.dtype)
    return pin_state(
        engine.llama.mesh,
        Committed(hidden_BTE, zeros_BT, zeros_BT, zeros_BT, zeros_BT[:, 0]),
    )


def caught_up(
    engine: Engine,
    variables: Params,
    state: DecodeState,
    deferred: Committed,
    due: jax.Array,
) -> tuple[DecodeState, Committed]:
    """The state whose drafter has read the deferred positions, if that is due and there are any."""
    backbone, heads = engine.backbone(variables), variables["heads"]

    def is_behind(carry: tuple[PyTree, Committed]) -> jax.Array:
        return due & jnp.any(carry[1].n_B > 0)

    def read(carry: tuple[PyTree, Committed]) -> tuple[PyTree, Committed]:
        drafter = engine.drafter.commit(heads, backbone, *carry)
        rows = carry[1]._replace(n_B=jnp.zeros_like(carry[1].n_B))
        return pin_state(engine.llama.mesh, drafter), pin_state(engine.llama.mesh, rows)

    # A loop that runs at most once: see `gated_step`.
    drafter, deferred = lax.while_loop(is_behind, read, (state.drafter, deferred))
    return state.replace(drafter=drafter), deferred


def gated_step(
    engine: Engine, variables: Params, state: DecodeState, deferred: Committed, more: More
) -> StepResult:
    """Take a step with the gate's size, then let the gate choose the next; in a pause, take several plain steps.

    Each size has a loop, and only the chosen size's loop runs: loops change the state
    in place, while the branches of a conditional would copy the cache.

    Args:
      more: whether there is another step to take after the first.
    """
    gate = state.gate
    assert gate is not None
    running_B = state.status_B == RUNNING
    without_drafts, may_draft = plain_step, jnp.array(True)
    if not engine.tree.drafted.depth:  # all drafts are copied
        text_BS = state.text_BS
        assert text_BS is not None  # `Engine.keeps_text`
        copied_B1, match_B = copied_tokens(text_BS, state.length_B, 1, state.predicted_BP)
        without_drafts = partial(testing_step, copied_B1, match_B)
        may_draft = ~gate.has_plain | jnp.any(running_B & (match_B >= REPEATS))
    chosen = jnp.where(may_draft, gate.index_1[0], 0)
    is_full = jnp.any(deferred.n_B == DEFERRED)
    state, deferred = caught_up(engine, variables, state, deferred, is_full | (chosen > 0))
    none = jnp.zeros((), jnp.int32)
    result = StepResult(state, deferred, none, jnp.zeros_like(state.n_new_B), none)
    rest = jnp.clip(gate.rest_1[0], 1, DEFERRED - jnp.max(deferred.n_B))
    for index, tree in enumerate(engine.gated):
        sized = replace(engine, tree=tree, gated=())
        tests = without_drafts is not plain_step or sized.tree.depth > 0

        def is_due(carry: StepResult, index: int = index, tests: bool = tests) -> jax.Array:
            due = (chosen == index) & (carry.taken < (1 if tests else rest))
            return due if tests else due & more(carry.taken, carry.state)

        def one_step(carry: StepResult, sized: Engine = sized) -> StepResult:
            with_size = step_with if sized.tree.depth else without_drafts
            return with_size(sized, variables, carry)

        result = lax.while_loop(is_due, one_step, result)
    after = gate.after_step(result.accepted_B, result.levels, running_B, result.taken)
    unchanged = gate.counted(0, result.taken)
    gate = jax.tree.map(partial(jnp.where, may_draft), after, unchanged)
    return result._replace(state=result.state.replace(gate=gate))


def step_with(engine: Engine, variables: Params, before: StepResult) -> StepResult:
    """A step with the engine's tree."""
    old = before.state
    new = decode_step(engine, variables, old)
    accepted_B = jnp.maximum(new.n_new_B - old.n_new_B - 1, 0)
    levels = jnp.array(engine.tree.depth, jnp.int32)
    new = pin_state(engine.llama.mesh, new)
    return StepResult(new, before.deferred, before.taken + 1, accepted_B, levels)


def plain_step(engine: Engine, variables: Params, before: StepResult) -> StepResult:
    """A step without drafts, whose position is deferred."""
    stand_in = Deferring(engine.drafter.heads, engine.drafter.llama, engine.drafter)
    result = step_with(replace(engine, drafter=stand_in), variables, before)
    new, deferred = result.state.drafter, before.deferred

    def appended(rows: jax.Array, row: jax.Array) -> jax.Array:
        return engine.kernels.write_rows(rows, row, deferred.n_B, axis=1)

    rows = Committed(
        appended(deferred.hidden_BTE, new.hidden_BTE),
        appended(deferred.tokens_BT, new.tokens_BT),
        appended(deferred.next_tokens_BT, new.next_tokens_BT),
        appended(deferred.positions_BT, new.positions_BT),
        deferred.n_B + new.n_B,
    )
    deferred = pin_state(engine.llama.mesh, rows)
    state = result.state.replace(drafter=before.state.drafter)
    return result._replace(state=state, deferred=deferred)


def testing_step(
    copied_B1: jax.Array, match_B: jax.Array, engine: Engine, variables: Params,
    before: StepResult,
) -> StepResult:  # fmt: skip
    """A step without drafts that tells the gate whether the token to copy next, if any, was right."""
    result = step_with(engine, variables, before)
    is_right_B = (match_B > 0) & (copied_B1[:, 0] == result.state.root_B)
    accepted_B = is_right_B.astype(jnp.int32)
    return result._replace(accepted_B=accepted_B, levels=jnp.array(1, jnp.int32))
