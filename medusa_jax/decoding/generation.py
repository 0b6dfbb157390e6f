"""The drivers of the decode step: prefill, then loops of steps until every row has ended.

`stream` runs `decode_step` in `lax.while_loop` on the device, in chunks of steps, and yields the progress. The host
dispatches the next chunk before it reads the previous one's results.
"""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.decoding.chunk_clock import ChunkClock
from medusa_jax.decoding.loop import FOREVER, decode_loop
from medusa_jax.decoding.prefill import prefill
from medusa_jax.decoding.request import DecodeRequest, prompt_arrays
from medusa_jax.decoding.state import (
    DecodeState,
    Engine,
    Progress,
    copied_progress,
    text_slots,
)
from medusa_jax.decoding.stopping import RUNNING, STOPPED
from medusa_jax.heads.state import grow_state
from medusa_jax.programs import program
from medusa_jax.sharding import Params, pin_state, placed

# A stream's chunks grow between these numbers of steps while they take less than these seconds: the host takes a core
# from the steps when it sends a chunk and shows its text.
CHUNK_STEPS, PACE = (8, 32), 0.1
# Steps of chunks that nobody reads: they end for the cache to grow, and for sizes to be chosen and timed.
UNREAD_STEPS = (64, FOREVER)
# Called with the state of the rows as each chunk will leave it.
Keep = Callable[[DecodeState], None]
tracing = ThreadPoolExecutor(1)


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


def begin(
    engine: Engine, variables: Params, request: DecodeRequest
) -> tuple[DecodeState, list[int]]:
    """Prefill a request; also returns the successive cache sizes for its rows."""
    cache_sizes, prompts = prompt_arrays(engine, request)
    state = prefill(engine.depth_only, cache_sizes[0], variables, prompts)
    return with_request(engine, state, request), cache_sizes


def with_request(engine: Engine, state: DecodeState, request: DecodeRequest) -> DecodeState:
    """The state with the request's gate and host; `prefill` has placed the rest as the decode loop returns it."""
    return state.replace(**placed(engine.llama.mesh, fields_of(request)))


def fields_of(request: DecodeRequest) -> dict[str, Any]:
    """Fields of the state that a request sets."""
    host_1 = np.array([request.host.number], np.int32) if request.host else None
    return {"gate": request.gate, "host_1": host_1}


def stream(
    engine: Engine,
    variables: Params,
    request: DecodeRequest,
    state: DecodeState,
    cache_sizes: list[int],
    keep: Keep | None = None,
    *,
    read_along: bool = True,
) -> Generator[Progress, np.ndarray | None]:
    """Decode in chunks a request that `begin` has prefilled, yielding the progress before and after each chunk.

    Consumes the state. The next chunk is dispatched before the last one is read. A chunk that fills the cache ends
    early; the host then grows the cache. The caller may send a mask [B] of rows to end (stop strings): they take no
    step after the chunk that is already dispatched.

    Args:
      keep: for a caller whose next request continues these rows.
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
        if keep:
            keep(state)
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
        if longest + engine.free_slots > cache_sizes[size] and size + 1 < len(cache_sizes):
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


def wait_for(programs: Iterable[Any]) -> None:
    """Wait until these results of `Program.prepare` can run."""
    for kept in programs:
        kept.run.result()


@program(static_argnums=0)
def end_rows(engine: Engine, status_B: jax.Array, ended_B: jax.Array) -> jax.Array:
    """The status with these rows stopped."""
    status_B = jnp.where(ended_B & (status_B == RUNNING), STOPPED, status_B)
    return pin_state(engine.llama.mesh, status_B)


def prepare_steps(
    engine: Engine, variables: Params, state: Any, larger: Sequence[int]
) -> list[Any]:
    """Begin to read or compile the programs of steps from a state of these shapes, and with larger caches."""
    ended_B = np.zeros(state.status_B.shape, bool)
    kept = [decode_loop.prepare(engine, variables, state, np.int32(0))]
    kept += [end_rows.prepare(engine.depth_only, state.status_B, ended_B)]
    for slots in larger:
        grown = grow.prepare(engine.depth_only, slots, state)
        state = grown.results
        kept += [grown, decode_loop.prepare(engine, variables, state, np.int32(0))]
    return kept


def warm_up(
    engine: Engine, variables: Params, request: DecodeRequest
) -> Callable[[], None]:
    """Compile what `stream` will run for this request.

    Where programs are not kept for later starts, it reads the prompts once and takes no decode step.

    Returns: a function that returns when steps can be taken. The prompts can be read at once.
    """
    (first, *larger), prompts = prompt_arrays(engine, request)
    if begun := prefill.prepare(engine.depth_only, first, variables, prompts):
        state = begun.results.replace(**fields_of(request))
        shown = copied_progress.prepare(engine.depth_only, state)
        # Another thread traces the steps: the prompt is read as soon as its own programs are compiled.
        steps = tracing.submit(prepare_steps, engine, variables, state, larger)
        wait_for([begun, shown])
        return lambda: wait_for(steps.result())
    begun = begin(engine, variables, request)
    copied_progress(engine.depth_only, begun[0])

    def no_step(state: DecodeState) -> tuple[DecodeState, Progress]:
        return decode_loop(engine, variables, state, np.int32(0))

    return partial(run_sizes, engine, no_step, *begun)


def run_sizes(engine: Engine, steps: Any, state: DecodeState, sizes: list[int]) -> None:
    """Run what ends rows, what grows the cache, and `steps` with each of its sizes. Consumes the state."""
    end_rows(engine.depth_only, state.status_B, np.zeros(len(state.status_B), bool))
    for slots in sizes:
        if slots > sizes[0]:
            state = grow(engine.depth_only, slots, state)
        state, _ = steps(state)
    jax.block_until_ready(state)
