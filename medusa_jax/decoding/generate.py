"""The decode loop: draft, verify, accept, commit, append, on the device and static in shape.

`decode_step` is one step. `generate` runs it in `lax.while_loop` until every row has ended;
`stream` runs the same loop a few steps at a time and hands out what is new. The host never
waits inside a loop: it dispatches the next one before it looks at the last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from medusa_jax.decoding.accept import (
    Accepted,
    accept_targets,
    accept_typical,
    target_tokens,
)
from medusa_jax.decoding.sampling import Sampling, gumbel, row_keys
from medusa_jax.heads.drafter import Base, Drafter
from medusa_jax.model.cache import KVCache
from medusa_jax.model.llama import Llama, at_least_f32
from medusa_jax.tree import Tree

# Why a row ended.
RUNNING, STOPPED, LIMIT = 0, 1, 2
MIN_SLOTS = 128
MIN_PROMPT = 16


@dataclass(frozen=True)
class Engine:
    """Everything about decoding that is fixed at compile time (a static argument of jit).

    Attributes:
      llama: the backbone, for prepared (fused) parameters.
      drafter: the draft heads.
      tree: the draft tree; the empty one is autoregressive decoding.
      acceptance: "greedy", "sampled" or "typical".
      eos_ids: tokens that end a row; the token itself is kept.
      stop_sequences: token sequences that end a row once they are complete.
      epsilon, delta: thresholds of typical acceptance.
    """

    llama: Llama
    drafter: Drafter
    tree: Tree
    acceptance: str = "greedy"
    eos_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    epsilon: float = 0.09
    delta: float = 0.3


class DecodeState(struct.PyTreeNode):
    """One batch of rows in flight; every array is static in shape.

    Attributes:
      cache: keys and values; slots [0, length) of a row are committed.
      drafter: the drafter's own state.
      sampling: per-row sampling parameters.
      tokens_BO: emitted tokens; [0, n_new) of a row count.
      depth_BO: for each of them the tree depth it was accepted at, 0 where the verifier chose
        it itself (the first token and the bonus tokens).
      n_new_B: tokens emitted so far, the one from prefill included.
      limit_B: most tokens the row may emit.
      length_B: text positions in the cache; the root is not in it yet.
      root_B: the last emitted token.
      status_B: RUNNING, STOPPED (EOS or stop sequence) or LIMIT.
      steps_B: decode steps the row took part in.
      histogram_BL: steps that appended 1, 2, ..., L tokens.
    """

    cache: KVCache
    drafter: Any
    sampling: Sampling
    tokens_BO: jax.Array
    depth_BO: jax.Array
    n_new_B: jax.Array
    limit_B: jax.Array
    length_B: jax.Array
    root_B: jax.Array
    status_B: jax.Array
    steps_B: jax.Array
    histogram_BL: jax.Array


class Progress(struct.PyTreeNode):
    """What the host may look at while the next loop runs: copies, never donated."""

    tokens_BO: jax.Array
    depth_BO: jax.Array
    n_new_B: jax.Array
    length_B: jax.Array
    status_B: jax.Array
    steps_B: jax.Array
    histogram_BL: jax.Array


def progress_of(state: DecodeState) -> Progress:
    """The host's view of a state."""
    return Progress(
        **{name: getattr(state, name) for name in Progress.__dataclass_fields__}
    )


def count_until_stop(
    engine: Engine,
    tokens_BO: jax.Array,
    emitted_BL: jax.Array,
    state: DecodeState,
    n_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """How many of the n tokens just written behind `n_new` may stay, and the new status.

    A row ends behind the first EOS, the first completed stop sequence, or its limit, and what
    follows inside the accepted path is cut.

    Args:
      tokens_BO: the output buffer with `emitted_BL` already written behind `n_new_B`.

    Returns: (count_B, status_B).
    """
    L = emitted_BL.shape[1]
    index_BL = jnp.broadcast_to(jnp.arange(L)[None, :], emitted_BL.shape)
    stops_BL = jnp.zeros(emitted_BL.shape, bool)
    for eos in engine.eos_ids:
        stops_BL |= emitted_BL == eos
    for sequence in engine.stop_sequences:
        complete_BL = jnp.ones(emitted_BL.shape, bool)
        for back, token in enumerate(reversed(sequence)):
            at_BL = state.n_new_B[:, None] + index_BL - back
            there_BL = jnp.take_along_axis(tokens_BO, jnp.maximum(at_BL, 0), axis=1)
            complete_BL &= (at_BL >= 0) & (there_BL == token)
        stops_BL |= complete_BL
    stops_BL &= index_BL < n_B[:, None]
    first_B = jnp.min(jnp.where(stops_BL, index_BL, L), axis=1)
    room_B = state.limit_B - state.n_new_B
    count_B = jnp.minimum(jnp.minimum(first_B + 1, n_B), room_B)
    stopped_B = first_B < jnp.minimum(n_B, room_B)
    status_B = jnp.where(stopped_B, STOPPED, jnp.where(room_B <= n_B, LIMIT, RUNNING))
    return count_B, status_B


def append(
    engine: Engine, state: DecodeState, emitted_BL: jax.Array, n_B: jax.Array
) -> DecodeState:
    """Write the first n tokens of each running row behind its text and see whether it ends.

    The first n - 1 are accepted drafts of depth 1, 2, ...; the n-th is the verifier's own.
    """
    # Rows write all L; what lies behind `n_new` is overwritten by the next step.
    write = jax.vmap(lambda row, new, at: lax.dynamic_update_slice(row, new, (at,)))
    tokens_BO = write(state.tokens_BO, emitted_BL, state.n_new_B)
    depth_L = jnp.arange(1, emitted_BL.shape[1] + 1)
    depth_BL = jnp.where(depth_L[None, :] < n_B[:, None], depth_L[None, :], 0)
    depth_BO = write(state.depth_BO, depth_BL.astype(state.depth_BO.dtype), state.n_new_B)
    count_B, status_B = count_until_stop(engine, tokens_BO, emitted_BL, state, n_B)
    running_B = state.status_B == RUNNING
    count_B = jnp.where(running_B, count_B, 0)
    return state.replace(
        tokens_BO=tokens_BO,
        depth_BO=depth_BO,
        n_new_B=state.n_new_B + count_B,
        status_B=jnp.where(running_B, status_B, state.status_B),
    )


def decode_step(
    engine: Engine, variables: dict[str, Any], state: DecodeState, tree: Any = None
) -> DecodeState:
    """Draft a tree, verify it in one backbone pass, keep the accepted path (Medusa 2.1).

    Args:
      engine: compile-time constants.
      variables: {"base": prepared backbone parameters, "heads": head parameters}.
      state: rows in flight, with room for M more slots in every running row.
      tree: the tree's arrays, by default the engine's own as constants. Property tests pass
        traced arrays instead, so that one compilation serves many trees.
    """
    tree = engine.tree if tree is None else tree
    base = Base(engine.llama, variables["base"])
    heads = variables["heads"]
    depth_M = jnp.asarray(tree.depth_M)
    L = tree.path_length
    sampling = state.sampling
    # g[pos] of the root's position and on: a child at depth d sits at length + d, so its target
    # token and its rank as a draft are decided by noise_BLV[:, d - 1].
    noise_BLV = None
    if engine.acceptance == "sampled":
        position_BL = state.length_B[:, None] + 1 + jnp.arange(L)[None, :]
        V = engine.llama.config.vocab_size
        noise_BLV = gumbel(sampling.key_B, position_BL, V, at_least_f32(engine.llama.dtype))

    def rank_scores(depth: int, logits: jax.Array) -> jax.Array:
        """Order of logits / T + g, as the verifier will see it (rows of T = 0: of the logits)."""
        if noise_BLV is None:
            return logits
        scaled_BV = (
            sampling.temperature_B[:, None].astype(logits.dtype) * noise_BLV[:, depth - 1]
        )
        middle = (1,) * (logits.ndim - 2)
        return logits + scaled_BV.reshape(scaled_BV.shape[0], *middle, scaled_BV.shape[1])

    # Draft.
    nodes_BM = engine.drafter.propose(
        heads, base, state.drafter, state.root_B, tree, rank_scores
    ).astype(jnp.int32)

    # Verify.
    positions_BM = state.length_B[:, None] + depth_M[None, :]
    hidden_BMD, cache = base.decode(
        nodes_BM, positions_BM, state.cache, state.length_B, jnp.asarray(tree.mask_MM)
    )
    logits_BMV = base.lm_head(hidden_BMD)

    # Accept.
    accepted: Accepted
    if engine.acceptance == "typical":
        accepted = accept_typical(
            nodes_BM, logits_BMV, tree, sampling, engine.epsilon, engine.delta
        )
    else:
        if noise_BLV is None:
            targets_BM = target_tokens(logits_BMV, positions_BM, None)
        else:
            by_depth = (noise_BLV, depth_M)
            targets_BM = target_tokens(logits_BMV, positions_BM, sampling, by_depth)
        accepted = accept_targets(nodes_BM, targets_BM, tree)
    path_BL, n_B, bonus_B = accepted

    # Commit: the root and the accepted drafts enter the text, the bonus token is the next root.
    running_B = state.status_B == RUNNING
    drafts_BL = jnp.take_along_axis(nodes_BM, path_BL, axis=1)
    shifted_BL = jnp.concatenate([drafts_BL[:, 1:], drafts_BL[:, :1]], axis=1)
    is_bonus_BL = jnp.arange(L)[None, :] == n_B[:, None]
    emitted_BL = jnp.where(is_bonus_BL, bonus_B[:, None], shifted_BL)
    taken_B = jnp.where(running_B, n_B + 1, 0)
    hidden_BLD = jnp.take_along_axis(hidden_BMD, path_BL[..., None], axis=1)
    position_BL = jnp.take_along_axis(positions_BM, path_BL, axis=1)
    drafter = engine.drafter.commit(
        heads, base, state.drafter, hidden_BLD, emitted_BL, position_BL, taken_B
    )
    if L > 1:
        cache = cache.commit(state.length_B, path_BL)

    # Append.
    new = append(engine, state, emitted_BL, n_B + 1)
    count_B = new.n_new_B - state.n_new_B
    bin_BL = jnp.arange(1, L + 1)[None, :] == count_B[:, None]
    return new.replace(
        cache=cache,
        drafter=drafter,
        length_B=state.length_B + taken_B,
        root_B=jnp.where(running_B, bonus_B, state.root_B),
        steps_B=state.steps_B + running_B,
        histogram_BL=state.histogram_BL + bin_BL.astype(jnp.int32),
    )


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode_loop(
    engine: Engine, variables: dict[str, Any], state: DecodeState, max_steps: jax.Array
) -> tuple[DecodeState, Progress]:
    """Steps until every row has ended, a running row lacks room in the cache, or `max_steps`.

    Compiled once per cache size: the cost of a step follows the slots there are, so the
    drivers grow the cache with the text.
    """
    slots, M = state.cache.slots, engine.tree.n_nodes

    def more(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        step, state = carry
        running_B = state.status_B == RUNNING
        fits = jnp.max(jnp.where(running_B, state.length_B, 0)) + M <= slots
        return (step < max_steps) & jnp.any(running_B) & fits

    def one(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        step, state = carry
        return step + 1, decode_step(engine, variables, state)

    _, state = lax.while_loop(more, one, (jnp.zeros((), jnp.int32), state))
    return state, jax.tree.map(jnp.copy, progress_of(state))


@partial(jax.jit, static_argnums=(0, 1))
def prefill(
    engine: Engine,
    slots: int,
    variables: dict[str, Any],
    prompt_BT: jax.Array,
    prompt_length_B: jax.Array,
    limit_B: jax.Array,
    sampling: Sampling,
    output: jax.Array,
) -> DecodeState:
    """Read the prompts and emit the first token of every row.

    Args:
      slots: cache slots to allocate, at least T.
      prompt_BT: token ids, right-padded; `prompt_length_B` of a row count (at least 1).
      limit_B: most tokens to emit, at least 1.
      output: an array of zeros [B, O] with O >= max(limit) + L.
    """
    B, T = prompt_BT.shape
    config, dtype = engine.llama.config, engine.llama.dtype
    base = Base(engine.llama, variables["base"])
    cache = KVCache.zeros(
        config.n_layers, B, slots, config.n_kv_heads, config.head_dim, dtype
    )
    position_BT = jnp.broadcast_to(jnp.arange(T)[None, :], (B, T))
    zero_B = jnp.zeros((B,), jnp.int32)
    hidden_BTD, cache = base.decode(
        prompt_BT, position_BT, cache, zero_B, jnp.asarray(np.tril(np.ones((T, T), bool)))
    )
    last_B11 = (prompt_length_B - 1)[:, None, None]
    logits_B1V = base.lm_head(jnp.take_along_axis(hidden_BTD, last_B11, axis=1))
    sampled = engine.acceptance == "sampled"
    target_B1 = target_tokens(
        logits_B1V, (prompt_length_B - 1)[:, None], sampling if sampled else None
    )
    root_B = target_B1[:, 0]
    next_BT = jnp.concatenate([prompt_BT[:, 1:], prompt_BT[:, :1]], axis=1)
    is_last_BT = position_BT == (prompt_length_B - 1)[:, None]
    next_BT = jnp.where(is_last_BT, root_B[:, None], next_BT)
    drafter = engine.drafter.commit(
        variables["heads"],
        base,
        engine.drafter.start(B, slots, dtype),
        hidden_BTD,
        next_BT,
        position_BT,
        prompt_length_B,
    )
    state = DecodeState(
        cache=cache,
        drafter=drafter,
        sampling=sampling,
        tokens_BO=output,
        depth_BO=output.astype(jnp.int8),
        n_new_B=zero_B,
        limit_B=limit_B,
        length_B=prompt_length_B,
        root_B=root_B,
        status_B=jnp.full((B,), RUNNING, jnp.int32),
        steps_B=zero_B,
        histogram_BL=jnp.zeros((B, engine.tree.path_length), jnp.int32),
    )
    padded = jnp.zeros((B, engine.tree.path_length), jnp.int32).at[:, 0].set(root_B)
    return append(engine, state, padded, zero_B + 1)


@partial(jax.jit, static_argnums=(0, 1))
def grow(engine: Engine, slots: int, state: DecodeState) -> DecodeState:
    """Room for `slots` cache slots in every row.

    The state is not donated: no buffer that grows can be reused, and JAX would warn.
    """
    return state.replace(
        cache=state.cache.grown(slots), drafter=engine.drafter.grow(state.drafter, slots)
    )


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
      temperature, top_k, top_p, min_p, seed: per-row sampling parameters.
      ids: request ids for the noise, by default the row numbers.
    """

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    temperature: Sequence[float] | None = None
    top_k: Sequence[int] | None = None
    top_p: Sequence[float] | None = None
    min_p: Sequence[float] | None = None
    seed: Sequence[int] | None = None
    ids: Sequence[int] | None = None


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
) -> Iterator[Progress]:
    """Decode in chunks of steps, yielding what there is after prefill and after each chunk.

    The next chunk is on its way before the last one is looked at. A chunk that finds the cache
    full ends early; the host then grows it.
    """
    state, ladder = begin(engine, variables, request)
    seen = jax.tree.map(jnp.copy, progress_of(state))
    rung = 0
    while True:
        state, ahead = decode_loop(engine, variables, state, np.int32(chunk_steps))
        yield seen
        running_B = np.asarray(seen.status_B) == RUNNING
        if not running_B.any():
            return
        longest = np.asarray(seen.length_B)[running_B].max()
        if longest + engine.tree.n_nodes > ladder[rung] and rung + 1 < len(ladder):
            rung += 1
            state = grow(engine, ladder[rung], state)
        seen = ahead


def warm_up(engine: Engine, variables: dict[str, Any], request: Request) -> None:
    """Compile everything that `generate` or `stream` will run for this request, and wait.

    Reads the prompts once and takes no decode step.
    """
    state, ladder = begin(engine, variables, request)
    jax.tree.map(jnp.copy, progress_of(state))
    for slots in ladder:
        if slots > ladder[0]:
            state = grow(engine, slots, state)
        state, progress = decode_loop(engine, variables, state, np.int32(0))
    jax.block_until_ready(progress)
