"""The drivers of the decode step: prefill, then loops of steps until every row has ended.

`finish` runs `decode_step` in `lax.while_loop` on the device; `stream` runs the same loop
a few steps at a time and yields the new tokens, as `finish` does with a gated engine. The host never waits
inside a loop: it dispatches the next loop before it reads the previous one's results.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from medusa_jax.arch import DELTA, EPSILON
from medusa_jax.decoding.gate import Gate
from medusa_jax.decoding.loop import FOREVER, decode_loop
from medusa_jax.decoding.masks import first_bits
from medusa_jax.decoding.penalties import PenaltyOptions, penalties_of
from medusa_jax.decoding.prefill import PromptArrays, prefill
from medusa_jax.decoding.sampling import Sampling, row_keys
from medusa_jax.decoding.state import (
    DecodeState,
    Engine,
    Progress,
    RowOptions,
    copied_progress,
    text_slots,
)
from medusa_jax.decoding.step_costs import ChunkClock, StepCosts
from medusa_jax.decoding.stopping import RUNNING, STOPPED, pack_stops
from medusa_jax.devices.platforms import program
from medusa_jax.heads.state import grow_state
from medusa_jax.host_calls import HostFunction
from medusa_jax.sharding import Params, pin_state, placed

if TYPE_CHECKING:
    from medusa_jax.constraints.host_work import Guide

MIN_PROMPT = 16
# A stream's chunks grow between these numbers of steps while they take less than these seconds: the host takes a core
# from the steps when it sends a chunk and shows its text.
CHUNK_STEPS, PACE = (8, 32), 0.1
# Steps of chunks that nobody reads: they end only for sizes to be chosen and timed.
UNREAD_STEPS = (64, FOREVER)


@program(static_argnums=(0, 1))
def grow(engine: Engine, slots: int, state: DecodeState) -> DecodeState:
    """The state with `slots` cache slots in every row.

    The state is not donated: buffers that grow cannot be reused, and JAX would warn.
    """
    text_BS = state.text_BS
    if text_BS is not None:
        new_slots = text_slots(engine, slots) - text_BS.shape[1]
        text_BS = jnp.pad(text_BS, ((0, 0), (0, new_slots)))
    larger = state.replace(
        cache=state.cache.grow(slots),
        drafter=grow_state(state.drafter, slots),
        text_BS=text_BS,
    )
    return pin_state(engine.llama.mesh, larger)


def power_of_two(n: int, minimum: int) -> int:
    """The smallest power of two that is at least n and at least `minimum`."""
    return max(minimum, 1 << max(0, n - 1).bit_length())


def successive_sizes(engine: Engine, longest_prompt: int, needed: int) -> list[int]:
    """Successive cache sizes: powers of two, up to the first that suffices.

    Args:
      longest_prompt: tokens of the longest prompt.
      needed: slots of the longest possible row, prompt + limit + `engine.n_rows`.
    """
    first = power_of_two(longest_prompt + engine.n_rows, engine.kernels.least_slots)
    cache_sizes = [first]
    while cache_sizes[-1] < needed:
        cache_sizes.append(2 * cache_sizes[-1])
    return cache_sizes


def output_slots(engine: Engine, limit: int) -> int:
    """Slots for new tokens: `limit` plus a whole path, rounded up to a power of two.

    Requests with similar limits share one compiled program.
    """
    return power_of_two(limit + engine.tree.path_length, 64)


@dataclass
class DecodeRequest:
    """Prompts and options of a batch, on the host; one entry per row.

    Attributes:
      prompts: token ids, none empty.
      limits: maximum number of tokens to emit per row, at least 1; prompt + limit must fit the context.
      stops: per row the token sequences that end it; they stay in the text. EOS ids are sequences of
        length 1.
      temperature, top_k, top_p, min_p, seed: per-row sampling parameters.
      ids: request ids for the noise, by default the row numbers.
      epsilon, delta: thresholds of typical acceptance.
      penalties: biases and penalties.
      guides: the constraint of each row, not used before; None if no row has one.
      host: answers the steps with guides, `guided.guided_step`.
      gate: of a gated engine, before the first step.
      costs: of its sizes; streams measure them.
      sizes: nodes of the trees that steps may take, if the caller gave no tree.
      predicted: tokens that are expected in each text, for served rows to copy drafts from.
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
    penalties: Sequence[PenaltyOptions] | None = None
    guides: "Sequence[Guide | None] | None" = None
    host: HostFunction | None = None
    gate: Gate | None = None
    costs: StepCosts | None = None
    sizes: Sequence[int] = ()
    predicted: Sequence[Sequence[int]] | None = None


class RowCache(Protocol):
    """A cache that outlives its request; `begin` starts the next request on it.

    Attributes:
      state: the row as its last step left it.
    """

    state: DecodeState | None

    def begin(
        self, engine: Engine, variables: Params, request: DecodeRequest
    ) -> tuple[DecodeState, list[int]]:
        """Prefill a request from the cached row, like the function `begin`."""


def begin(
    engine: Engine, variables: Params, request: DecodeRequest
) -> tuple[DecodeState, list[int]]:
    """Prefill a request; also returns the successive cache sizes for its rows."""
    cache_sizes, prompts = prompt_arrays(engine, request)
    state = prefill(engine.depth_only, cache_sizes[0], variables, prompts)
    return with_request(engine, state, request), cache_sizes


def with_request(engine: Engine, state: DecodeState, request: DecodeRequest) -> DecodeState:
    """The state with the request's gate and host, placed as the decode loop returns it."""
    return placed(engine.llama.mesh, state.replace(**fields_of(request)))


def fields_of(request: DecodeRequest) -> dict[str, Any]:
    """Fields of the state that a request sets."""
    host_1 = np.array([request.host.number], np.int32) if request.host else None
    return {"gate": request.gate, "host_1": host_1}


# On the host; `row_keys` is called in traces, too.
keys_of_rows = program()(row_keys)


def row_options(
    request: DecodeRequest, vocab_size: int, stops: tuple[int, int] = (1, 1)
) -> RowOptions:
    """The options of each row of a request, in NumPy's arrays.

    Args:
      stops: least numbers of stop sequences and of tokens of each.
    """
    B = len(request.prompts)

    def per_row(values: Sequence | None, default: float, dtype: DTypeLike) -> Any:
        return np.array(values if values is not None else [default] * B, dtype)

    ids = request.ids if request.ids is not None else range(B)
    sampling = Sampling(
        temperature_B=per_row(request.temperature, 0.0, np.float32),
        top_k_B=per_row(request.top_k, 0, np.int32),
        top_p_B=per_row(request.top_p, 1.0, np.float32),
        min_p_B=per_row(request.min_p, 0.0, np.float32),
        key_B=keys_of_rows(per_row(request.seed, 0, np.uint32), np.array(ids, np.uint32)),
        epsilon_B=per_row(request.epsilon, EPSILON, np.float32),
        delta_B=per_row(request.delta, DELTA, np.float32),
        penalties=penalties_of(request.penalties, request.prompts, vocab_size),
        first_BW=first_bits(request.guides, vocab_size),
    )
    stop_BQW: Any = pack_stops(request.stops or [()] * B, stops)
    return RowOptions(sampling, per_row(request.limits, 0, np.int32), stop_BQW)


def prompt_arrays(engine: Engine, request: DecodeRequest) -> tuple[list[int], PromptArrays]:
    """Successive cache sizes of a request, and its arrays for `prefill` with the first size."""
    B = len(request.prompts)
    lengths: Any = np.array([len(p) for p in request.prompts], np.int32)
    options = row_options(request, engine.llama.config.vocab_size)
    limits: Any = options.limit_B
    if lengths.min() < 1 or limits.min() < 1:
        raise ValueError("every row needs a prompt of at least one token and a limit >= 1")
    needed = int((lengths + limits).max()) + engine.n_rows
    cache_sizes = successive_sizes(engine, int(lengths.max()), needed)
    T = min(power_of_two(int(lengths.max()), MIN_PROMPT), cache_sizes[0])
    prompt_BT: Any = np.zeros((B, T), np.int32)
    for row, prompt in enumerate(request.prompts):
        prompt_BT[row, : len(prompt)] = prompt

    output: Any = np.zeros((B, output_slots(engine, int(limits.max()))), np.int32)
    prompts = PromptArrays(
        prompt_BT=prompt_BT, prompt_length_B=lengths, options=options, output_BO=output
    )
    return cache_sizes, prompts


def finish(
    engine: Engine,
    variables: Params,
    request: DecodeRequest,
    state: DecodeState,
    cache_sizes: list[int],
) -> Progress:
    """Decode a request that `begin` has prefilled to its end. Consumes the state.

    One loop per cache size, all dispatched without waiting, or chunks if the engine is gated.
    """
    if engine.gated:  # its steps are timed
        begun = state, cache_sizes
        *_, progress = stream(engine, variables, request, *begun, read_along=False)
        return progress
    for slots in cache_sizes:
        if slots > cache_sizes[0]:
            state = grow(engine.depth_only, slots, state)
        state, progress = decode_loop(engine, variables, state, np.int32(FOREVER))
    return progress


def stream(
    engine: Engine,
    variables: Params,
    request: DecodeRequest,
    state: DecodeState,
    cache_sizes: list[int],
    row_cache: RowCache | None = None,
    *,
    read_along: bool = True,
) -> Generator[Progress, np.ndarray | None]:
    """Decode a request that `begin` has prefilled in chunks, yielding the progress before and after each chunk.

    Consumes the state. The next chunk is dispatched before the last one is read. A chunk that fills the cache ends
    early; the host then grows the cache. The caller may send a mask [B] of rows to end (stop strings): they take no
    step after the chunk that is already dispatched.

    Args:
      row_cache: receives the state after each chunk.
      read_along: the caller shows text as it grows; if not, chunks are longer.
    """
    assert request.guides is None or request.host, "`constrained.stream` has guides"
    progress = copied_progress(engine.depth_only, state)
    ended_B = np.zeros(len(request.prompts), bool)
    (least, most), pace = (CHUNK_STEPS, PACE) if read_along else (UNREAD_STEPS, 1.0)
    size, steps, ready = 0, least, 0.0
    may_grow = jax.process_count() == 1  # several have to agree
    clock = None
    if request.costs and may_grow:
        clock = ChunkClock(request.costs, len(request.prompts), engine.gated)
    while True:
        n_steps = steps
        if clock and state.gate:
            gate = {"gate": clock.gate_of_next(state.gate)}
            state = state.replace(**placed(engine.llama.mesh, gate))
            n_steps = clock.steps or steps
        state, next_progress = decode_loop(engine, variables, state, np.int32(n_steps))
        if row_cache:
            row_cache.state = state
        if clock:
            clock.see(progress)
        if request.host:
            jax.block_until_ready(progress)
            request.host.check()
        stop_B = yield progress
        state, ended_B = end_wanted(engine, state, ended_B, stop_B)
        running_B = (np.asarray(progress.status_B) == RUNNING) & ~ended_B
        began, ready = ready, time.perf_counter()
        if not running_B.any():
            if clock:
                clock.costs.keep()
            return
        longest = np.asarray(progress.length_B)[running_B].max()
        if longest + engine.n_rows > cache_sizes[size] and size + 1 < len(cache_sizes):
            size += 1
            state = grow(engine.depth_only, cache_sizes[size], state)
        progress = next_progress
        if may_grow and ready - began < pace:
            steps = min(2 * steps, most)


def end_wanted(
    engine: Engine, state: DecodeState, ended_B: np.ndarray, stop_B: np.ndarray | None
) -> tuple[DecodeState, np.ndarray]:
    """Stop the rows that a stream's caller wants to end; returns the state and all rows ended so far."""
    if stop_B is None or not (stop_B & ~ended_B).any():
        return state, ended_B
    ended_B = ended_B | stop_B
    status_B = end_rows(engine.depth_only, state.status_B, ended_B)
    return state.replace(status_B=status_B), ended_B


@program(static_argnums=0)
def end_rows(engine: Engine, status_B: jax.Array, ended_B: jax.Array) -> jax.Array:
    """The status with these rows stopped."""
    status_B = jnp.where(ended_B & (status_B == RUNNING), STOPPED, status_B)
    return pin_state(engine.llama.mesh, status_B)


def prepare(
    engine: Engine, variables: Params, request: DecodeRequest
) -> tuple[list[Any], list[Any]] | None:
    """Begin to read or compile the programs of a request side by side.

    Returns: two lists of results of `Program.prepare`: for the prompt, for the steps. None where programs are not kept.
    """
    (first, *others), prompts = prompt_arrays(engine, request)
    begun = prefill.prepare(engine.depth_only, first, variables, prompts)
    if begun is None:
        return None
    state = begun.results.replace(**fields_of(request))
    ended_B = np.zeros(len(request.prompts), bool)
    loop = decode_loop.prepare(engine, variables, state, np.int32(0))
    shown = copied_progress.prepare(engine.depth_only, state)
    steps = [loop, end_rows.prepare(engine.depth_only, state.status_B, ended_B)]
    for slots in others:
        grown = grow.prepare(engine.depth_only, slots, state)
        state = grown.results
        steps += [grown, decode_loop.prepare(engine, variables, state, np.int32(0))]
    return [begun, shown], steps


def warm_up(engine: Engine, variables: Params, request: DecodeRequest) -> Iterator[None]:
    """Compile what `finish` or `stream` will run for this request.

    It yields twice: when the prompt can be read, and when steps can be taken. Where programs are not kept for later
    starts, it reads the prompts once and takes no decode step.
    """
    if stages := prepare(engine, variables, request):
        for stage in stages:
            for program in stage:
                program.run.result()
            yield
        return
    state, cache_sizes = begin(engine, variables, request)
    copied_progress(engine.depth_only, state)
    yield
    end_rows(engine.depth_only, state.status_B, np.zeros(len(request.prompts), bool))
    for slots in cache_sizes:
        if slots > cache_sizes[0]:
            state = grow(engine.depth_only, slots, state)
        state, _ = decode_loop(engine, variables, state, np.int32(0))
    jax.block_until_ready(state)
    yield
