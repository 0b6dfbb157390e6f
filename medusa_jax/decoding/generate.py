"""The drivers of the decode step: prefill, then loops of steps until every row has ended.

`generate` runs `decode_step` in `lax.while_loop` on the device; `stream` runs the same loop a few
steps at a time and hands out what is new. The host never waits inside a loop: it dispatches the
next one before it looks at the last.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.decoding.acceptance.targets import target_tokens
from medusa_jax.decoding.repeats import without_repeats
from medusa_jax.decoding.sampling import Sampling, row_keys
from medusa_jax.decoding.state import DecodeState, Engine, Progress, progress_of
from medusa_jax.decoding.step import decode_loop, decode_step, emit, write_tokens
from medusa_jax.decoding.stopping import LIMIT, RUNNING, STOPPED, pack_stops
from medusa_jax.heads.drafter import Base
from medusa_jax.model.cache import KVCache
from medusa_jax.sharding import pin_state

__all__ = [
    "LIMIT",
    "RUNNING",
    "STOPPED",
    "DecodeState",
    "Engine",
    "Progress",
    "Request",
    "begin",
    "decode_loop",
    "decode_step",
    "finish",
    "generate",
    "grow",
    "power_of_two",
    "prefill",
    "progress_of",
    "slot_ladder",
    "stream",
    "warm_up",
]

MIN_SLOTS = 128
MIN_PROMPT = 16
# Tokens of a prompt that are read at once: enough for the arithmetic to outweigh reading the
# weights on any device, few enough for their activations to be small beside the weights.
PIECE = 512


@partial(jax.jit, static_argnums=(0, 1))
def prefill(
    engine: Engine,
    slots: int,
    variables: dict[str, Any],
    prompt_BT: jax.Array,
    prompt_length_B: jax.Array,
    limit_B: jax.Array,
    stop_BQW: jax.Array,
    sampling: Sampling,
    output: jax.Array,
) -> DecodeState:
    """Read the prompts and emit the first token of every row.

    Long prompts are read in pieces of `PIECE` tokens, each behind the ones before it: the memory
    that this takes beside the cache does not grow with the prompt.

    Args:
      slots: cache slots to allocate, at least T.
      prompt_BT: token ids, right-padded, T at most one piece or whole pieces; `prompt_length_B`
        of a row count (at least 1).
      limit_B: most tokens to emit, at least 1.
      stop_BQW: token sequences that end a row, as `pack_stops` gives them.
      output: an array of zeros [B, O] with O >= max(limit) + L.
    """
    B, T = prompt_BT.shape
    piece = min(T, PIECE)
    if T % piece:
        raise ValueError(f"{T} prompt tokens are no multiple of a piece of {piece}")
    config, dtype = engine.llama.config, engine.llama.dtype
    base = Base(engine.llama, variables["base"])
    zero_B = jnp.zeros((B,), jnp.int32)
    last_B1 = (prompt_length_B - 1)[:, None]
    text_BS = None
    if engine.no_repeat_ngram_size:
        text_BS = jnp.zeros((B, text_slots(engine, slots)), prompt_BT.dtype)
        text_BS = text_BS.at[:, :T].set(prompt_BT)

    def first_token(hidden_B1D: jax.Array) -> jax.Array:
        logits_B1V = base.lm_head(hidden_B1D)
        if text_BS is not None:
            logits_B1V = without_repeats(
                logits_B1V, text_BS[:, None], last_B1, engine.no_repeat_ngram_size
            )
        drawn = engine.rule.noise is not None
        return target_tokens(logits_B1V, last_B1, sampling if drawn else None)[:, 0]

    def read(i: Any, carry: tuple[KVCache, Any, jax.Array]) -> Any:
        """Piece i of every prompt; the first token of the rows that end in it."""
        cache, drafter, root_B = carry
        begin = i * piece
        position_BT = jnp.broadcast_to(begin + jnp.arange(piece)[None, :], (B, piece))
        tokens_BT = lax.dynamic_slice_in_dim(prompt_BT, begin, piece, axis=1)
        hidden_BTD, cache = base.decode(tokens_BT, position_BT, cache, zero_B + begin)
        here_B1 = jnp.clip(last_B1 - begin, 0, piece - 1)
        last_B1D = jnp.take_along_axis(hidden_BTD, here_B1[..., None], axis=1)
        is_last_BT = position_BT == last_B1
        ends_B = jnp.any(is_last_BT, axis=1)
        if piece == T:
            root_B = first_token(last_B1D)
        else:
            root_B = lax.cond(
                jnp.any(ends_B),
                lambda: jnp.where(ends_B, first_token(last_B1D), root_B),
                lambda: root_B,
            )
        next_BT = lax.dynamic_slice_in_dim(following_BT, begin, piece, axis=1)
        next_BT = jnp.where(is_last_BT, root_B[:, None], next_BT)
        rows = (
            hidden_BTD,
            next_BT,
            position_BT,
            jnp.clip(prompt_length_B - begin, 0, piece),
        )
        drafter = engine.drafter.commit(variables["heads"], base, drafter, *rows)
        return cache, drafter, root_B

    following_BT = jnp.concatenate([prompt_BT[:, 1:], prompt_BT[:, :1]], axis=1)
    sizes = (config.n_layers, B, slots, config.n_kv_heads, config.head_dim)
    drafter = engine.drafter.start(B, slots, dtype)
    carry = (KVCache.zeros(*sizes, dtype), drafter, zero_B)
    if piece == T:
        cache, drafter, root_B = read(0, carry)
    else:  # only as far as the longest prompt goes
        pieces = -(-jnp.max(prompt_length_B) // piece)
        cache, drafter, root_B = lax.fori_loop(0, pieces, read, carry)
    if text_BS is not None:
        text_BS = write_tokens(text_BS, root_B[:, None], prompt_length_B)
    state = DecodeState(
        cache=cache,
        drafter=drafter,
        sampling=sampling,
        tokens_BO=output,
        depth_BO=output.astype(jnp.int8),
        n_new_B=zero_B,
        limit_B=limit_B,
        stop_BQW=stop_BQW,
        length_B=prompt_length_B,
        root_B=root_B,
        status_B=jnp.full((B,), RUNNING, jnp.int32),
        steps_B=zero_B,
        histogram_BL=jnp.zeros((B, engine.tree.path_length), jnp.int32),
        text_BS=text_BS,
    )
    padded = jnp.zeros((B, engine.tree.path_length), jnp.int32).at[:, 0].set(root_B)
    state, _ = emit(state, padded, zero_B + 1)
    return pin_state(engine.llama.mesh, state)


@partial(jax.jit, static_argnums=(0, 1))
def grow(engine: Engine, slots: int, state: DecodeState) -> DecodeState:
    """Room for `slots` cache slots in every row.

    The state is not donated: no buffer that grows can be reused, and JAX would warn.
    """
    text_BS = state.text_BS
    if text_BS is not None:
        more = text_slots(engine, slots) - text_BS.shape[1]
        text_BS = jnp.pad(text_BS, ((0, 0), (0, more)))
    grown = state.replace(
        cache=state.cache.grown(slots),
        drafter=engine.drafter.grow(state.drafter, slots),
        text_BS=text_BS,
    )
    return pin_state(engine.llama.mesh, grown)


def text_slots(engine: Engine, slots: int) -> int:
    """Room for the text: what the cache holds, the root, and a whole path behind it."""
    return slots + engine.tree.path_length


def power_of_two(n: int, least: int) -> int:
    """The smallest power of two that is at least n and at least `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())


def slot_ladder(engine: Engine, longest_prompt: int, needed: int) -> list[int]:
    """Cache sizes to step through: powers of two, up to the first that suffices.

    Args:
      longest_prompt: tokens of the longest prompt.
      needed: slots of the longest possible row, prompt + limit + M.
    """
    first = power_of_two(longest_prompt + engine.tree.n_nodes, MIN_SLOTS)
    ladder = [first]
    while ladder[-1] < needed:
        ladder.append(2 * ladder[-1])
    return ladder


@dataclass
class Request:
    """What to decode, host side; one entry per row.

    Attributes:
      prompts: token ids, none empty.
      limits: most tokens to emit per row, at least 1; prompt + limit must fit the context.
      stops: per row the token sequences that end it, themselves kept; EOS ids are sequences
        of length 1.
      temperature, top_k, top_p, min_p, seed: per-row sampling parameters.
      ids: request ids for the noise, by default the row numbers.
      epsilon, delta: thresholds of typical acceptance.
    """

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    stops: Sequence[Sequence[Sequence[int]]] | None = None
    temperature: Sequence[float] | None = None
    top_k: Sequence[int] | None = None
    top_p: Sequence[float] | None = None
    min_p: Sequence[float] | None = None
    seed: Sequence[int] | None = None
    ids: Sequence[int] | None = None
    epsilon: Sequence[float] | None = None
    delta: Sequence[float] | None = None


def begin(
    engine: Engine, variables: dict[str, Any], request: Request
) -> tuple[DecodeState, list[int]]:
    """Prefill a request; also returns the cache sizes that its rows may grow through."""
    B = len(request.prompts)
    lengths = np.array([len(p) for p in request.prompts], np.int32)
    limits = np.array(request.limits, np.int32)
    if lengths.min() < 1 or limits.min() < 1:
        raise ValueError("every row needs a prompt of at least one token and a limit >= 1")
    M, L = engine.tree.n_nodes, engine.tree.path_length
    ladder = slot_ladder(engine, int(lengths.max()), int((lengths + limits).max()) + M)
    T = min(power_of_two(int(lengths.max()), MIN_PROMPT), ladder[0])
    prompt_BT = np.zeros((B, T), np.int32)
    for row, prompt in enumerate(request.prompts):
        prompt_BT[row, : len(prompt)] = prompt

    def per_row(values: Sequence | None, default: float, dtype: Any) -> jax.Array:
        return jnp.asarray(np.array(values if values is not None else [default] * B, dtype))

    ids = request.ids if request.ids is not None else range(B)
    sampling = Sampling(
        temperature_B=per_row(request.temperature, 0.0, np.float32),
        top_k_B=per_row(request.top_k, 0, np.int32),
        top_p_B=per_row(request.top_p, 1.0, np.float32),
        min_p_B=per_row(request.min_p, 0.0, np.float32),
        key_B=row_keys(
            per_row(request.seed, 0, np.uint32), jnp.asarray(np.array(ids, np.int32))
        ),
        epsilon_B=per_row(request.epsilon, 0.09, np.float32),
        delta_B=per_row(request.delta, 0.3, np.float32),
    )
    # Rounded up, so that requests of similar limits share one compilation.
    output = jnp.zeros((B, power_of_two(int(limits.max()) + L, 64)), jnp.int32)
    state = prefill(
        engine,
        ladder[0],
        variables,
        jnp.asarray(prompt_BT),
        jnp.asarray(lengths),
        jnp.asarray(limits),
        jnp.asarray(pack_stops(request.stops or [()] * B)),
        sampling,
        output,
    )
    return state, ladder


def generate(engine: Engine, variables: dict[str, Any], request: Request) -> Progress:
    """Decode every row to its end: one loop per cache size, all dispatched without waiting."""
    state, ladder = begin(engine, variables, request)
    return finish(engine, variables, state, ladder)


def finish(
    engine: Engine, variables: dict[str, Any], state: DecodeState, ladder: list[int]
) -> Progress:
    """Run the rest of a request that `begin` has prefilled. Consumes the state."""
    forever = np.int32(np.iinfo(np.int32).max)
    for slots in ladder:
        if slots > ladder[0]:
            state = grow(engine, slots, state)
        state, progress = decode_loop(engine, variables, state, forever)
    return progress


def stream(
    engine: Engine, variables: dict[str, Any], request: Request, chunk_steps: int = 8
) -> Generator[Progress, np.ndarray | None]:
    """Decode in chunks of steps, yielding what there is after prefill and after each chunk.

    The next chunk is on its way before the last one is looked at. A chunk that finds the cache
    full ends early; the host then grows it. The caller may send back which rows [B] it wants
    ended (stop strings): they take no step beyond the chunk that is on its way.
    """
    state, ladder = begin(engine, variables, request)
    seen = jax.tree.map(jnp.copy, progress_of(state))
    ended_B = np.zeros(len(request.prompts), bool)
    size = 0
    while True:
        state, ahead = decode_loop(engine, variables, state, np.int32(chunk_steps))
        wanted_B = yield seen
        if wanted_B is not None and (wanted_B & ~ended_B).any():
            ended_B = ended_B | wanted_B
            status_B = end_rows(engine, state.status_B, jnp.asarray(ended_B))
            state = state.replace(status_B=status_B)
        running_B = (np.asarray(seen.status_B) == RUNNING) & ~ended_B
        if not running_B.any():
            return
        longest = np.asarray(seen.length_B)[running_B].max()
        if longest + engine.tree.n_nodes > ladder[size] and size + 1 < len(ladder):
            size += 1
            state = grow(engine, ladder[size], state)
        seen = ahead


@partial(jax.jit, static_argnums=0)
def end_rows(engine: Engine, status_B: jax.Array, ended_B: jax.Array) -> jax.Array:
    """The same status, these rows no longer running."""
    ended_B = jnp.where(ended_B & (status_B == RUNNING), STOPPED, status_B)
    return pin_state(engine.llama.mesh, ended_B)


def warm_up(engine: Engine, variables: dict[str, Any], request: Request) -> None:
    """Compile everything that `generate` or `stream` will run for this request, and wait.

    Reads the prompts once and takes no decode step.
    """
    state, ladder = begin(engine, variables, request)
    jax.tree.map(jnp.copy, progress_of(state))
    end_rows(engine, state.status_B, jnp.zeros((len(request.prompts),), bool))
    for slots in ladder:
        if slots > ladder[0]:
            state = grow(engine, slots, state)
        state, progress = decode_loop(engine, variables, state, np.int32(0))
    jax.block_until_ready(progress)
