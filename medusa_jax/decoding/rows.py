"""Continuous batching: replace rows of a running batch.

A state of B rows is created once, without any text. A prompt is read into a separate state
of one row, piece by piece while the batch keeps decoding; this row then replaces one that
has ended. An ended row keeps its cache, so a prompt that shares a prefix with it is read
only from the first difference on.

Every function is compiled once per number of rows, slots and tokens read.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.decoding.logprobs import Logprobs
from medusa_jax.decoding.penalties import Penalties
from medusa_jax.decoding.prefill import read_piece
from medusa_jax.decoding.request import DecodeRequest, row_options
from medusa_jax.decoding.state import (
    PREDICTED,
    DecodeState,
    Engine,
    RowOptions,
    empty_logprobs,
    fresh_state,
)
from medusa_jax.decoding.stopping import PAUSED, RUNNING, STOPPED
from medusa_jax.decoding.token_sets import NO_TOKEN
from medusa_jax.programs import program
from medusa_jax.sharding import PyTree, pin_state


@dataclass(frozen=True)
class Sizes:
    """Sizes of a state that do not depend on its number of rows and slots.

    Attributes:
      outputs: O, the most new tokens of a row.
      ends: Q, the most tokens that end a row.
    """

    outputs: int
    ends: int


def idle_rows(engine: Engine, sizes: Sizes, rows: int, slots: int) -> DecodeState:
    """A state of rows without text, all ended, with `slots` cache slots each."""
    request = DecodeRequest([[]] * rows, [0] * rows)
    options = row_options(request, engine.llama.config.vocab_size, sizes.ends)
    tokens_BO = jnp.zeros((rows, sizes.outputs), jnp.int32)
    state = fresh_state(engine, slots, options, tokens_BO)
    state = state.replace(status_B=jnp.full_like(state.status_B, STOPPED))
    if engine.tree.copied_C.size:
        none_BP = jnp.full((rows, PREDICTED), NO_TOKEN, jnp.int32)
        state = state.replace(predicted_BP=none_BP)
    return pin_state(engine.llama.mesh, state)


idle = program(static_argnums=(0, 1, 2, 3))(idle_rows)


@program(static_argnums=(0, 1, 2))
def with_slots(engine: Engine, sizes: Sizes, slots: int, row: DecodeState) -> DecodeState:
    """The state of one row with another number of slots, to which an ended text is truncated."""

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        first = (0,) * new.ndim
        shape = tuple(map(min, new.shape, old.shape))
        return lax.dynamic_update_slice(new, lax.slice(old, first, shape), first)

    new = jax.tree.map(keep, idle_rows(engine, sizes, 1, slots), row)
    new = new.replace(length_B=jnp.minimum(new.length_B, slots))
    return pin_state(engine.llama.mesh, new)


@program(static_argnums=0)
def take_row(engine: Engine, state: PyTree, source: jax.Array) -> PyTree:
    """A copy of row `source` of a state, or of any tree of arrays [B, ...]; B = 1."""
    row = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, source, 1), state)
    return pin_state(engine.llama.mesh, row)


@program(static_argnums=0)
def begin_row(engine: Engine, row: DecodeState, options: RowOptions) -> DecodeState:
    """A state of one row to read a prompt in.

    Args:
      row: a copy of a row whose text shares the prompt's beginning, or of any row.
      options: of the new request, B = 1.
    """
    fresh = fresh_state(engine, row.cache.slots, options, jnp.zeros_like(row.tokens_BO))
    kept = "cache", "drafter", "text_BS", "predicted_BP", "logprobs"
    row = fresh.replace(**{name: getattr(row, name) for name in kept})
    return pin_state(engine.llama.mesh, row)


# `read_piece` for a served row, whose memory it reuses.
read_row = program(static_argnums=0, donate_argnums=2)(read_piece)


@program(static_argnums=0, donate_argnums=1)
def insert_row(engine: Engine, state: PyTree, row: PyTree, at: jax.Array) -> PyTree:
    """A state, or any tree of arrays [B, ...], with row `at` replaced; slots must be equal."""

    def put(x: jax.Array, new_row: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, new_row, at, axis=0)

    return pin_state(engine.llama.mesh, jax.tree.map(put, state, row))


@program(static_argnums=0)
def run_only(
    engine: Engine,
    status_B: jax.Array,
    wanted_B: jax.Array,
    steps: jax.Array,
    short_steps: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Set the status of rows that have not ended to `wanted_B`: running, paused or stopped.

    A paused row keeps its text: steps write only after it, to slots that are not read.

    Returns: the status, and the number of steps to take: `steps`, or `short_steps` if a row to run has already
      ended without the host knowing.
    """
    alive_B = (status_B == RUNNING) | (status_B == PAUSED)
    any_ended = jnp.any((wanted_B == RUNNING) & ~alive_B)
    status_B = pin_state(engine.llama.mesh, jnp.where(alive_B, wanted_B, status_B))
    return status_B, jnp.where(any_ended, short_steps, steps)


class RowExtras(NamedTuple):
    """Parts of a state that only some requests need.

    A server stores the first two apart while other requests step. `first_BW` is needed until the prompt is read.
    """

    logprobs: Logprobs | None = None
    penalties: Penalties | None = None
    first_BW: jax.Array | None = None


def split_extras(state: DecodeState) -> tuple[DecodeState, RowExtras]:
    """Split a state into the state without its extras, and the extras."""
    extras = RowExtras(state.logprobs, state.sampling.penalties, state.sampling.first_BW)
    return with_extras(state, RowExtras()), extras


def with_extras(state: DecodeState, parts: RowExtras) -> DecodeState:
    sampling = state.sampling.replace(penalties=parts.penalties, first_BW=parts.first_BW)
    return state.replace(logprobs=parts.logprobs, sampling=sampling)


@program(static_argnums=0)
def empty_extras(engine: Engine, tokens_BO: jax.Array) -> RowExtras:
    """Extras before the first token: zeros for log-probabilities, and penalties that change nothing."""
    zero_B = jnp.zeros((tokens_BO.shape[0],), jnp.float32)
    zero_BV = jnp.zeros((len(zero_B), engine.llama.config.vocab_size), jnp.int32)
    bias_BV, no_BV = zero_BV.astype(jnp.float32), zero_BV.astype(bool)
    penalties = Penalties(
        presence_B=zero_B,
        frequency_B=zero_B,
        repetition_B=zero_B + 1,
        bias_BV=bias_BV,
        prompt_BV=no_BV,
        counts_BV=zero_BV,
        left_B=zero_B.astype(jnp.int32),
        ends_BV=no_BV,
    )
    room = RowExtras(empty_logprobs(engine, tokens_BO), penalties)
    return pin_state(engine.llama.mesh, room)
