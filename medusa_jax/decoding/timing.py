"""Seconds of a decode step on this device."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from medusa_jax.decoding.generate import (
    MIN_SLOTS,
    Engine,
    Request,
    begin,
    decode_loop,
    grow,
    power_of_two,
)
from medusa_jax.errors import UserError


def engine_seconds(*args: Any, **how: Any) -> list[float]:
    """Median seconds of one decode step of each engine; arguments as `engine_rounds`."""
    return [statistics.median(seconds) for seconds in engine_rounds(*args, **how)]


def engine_rounds(
    engines: Sequence[Engine],
    variables: dict[str, Any],
    prompt: Sequence[int],
    *,
    batch: int = 1,
    temperature: float = 0.0,
    n_steps: int = 16,
    rounds: int = 7,
    one_by_one: Sequence[bool] = (),
) -> list[list[float]]:
    """Seconds of one decode step of each engine, in every round: draft, verify, accept, commit, append.

    Every round runs every engine once, `n_steps` steps on the device in one go, behind the same
    prompt and in a cache of the same number of slots, with room for all steps of all trees: a
    step costs what its slots ask for. Nothing ends a run before its last step, which is checked.

    Args:
      one_by_one: for each engine whether the host dispatches its steps by themselves (without
        waiting for the one before); by default none is.

    Raises:
      UserError: the context leaves no room for a step behind the prompt.
    """
    trees, context = [e.tree for e in engines], engines[0].llama.config.max_position
    L, R = max(t.path_length for t in trees), max(e.n_rows for e in engines)
    n_steps = min(n_steps, (context - len(prompt) - 1) // L)
    if n_steps < 1:
        raise UserError(
            f"a prompt of {len(prompt)} tokens leaves no room for a step of up to {L} tokens "
            f"in a context of {context}"
        )
    slots = power_of_two(len(prompt) + n_steps * L + R, MIN_SLOTS)
    request = Request(
        prompts=[list(prompt)] * batch,
        limits=[n_steps * L + 1] * batch,
        temperature=[temperature] * batch,
    )

    def run(engine: Engine, in_one_go: int) -> float:
        state, _ = begin(engine, variables, request)
        state = jax.block_until_ready(grow(engine.depth_only, slots, state))
        start = time.perf_counter()
        for _ in range(n_steps // in_one_go):
            state, progress = decode_loop(engine, variables, state, np.int32(in_one_go))
        jax.block_until_ready(progress)
        seconds = time.perf_counter() - start
        made = np.asarray(progress.steps_B)
        assert (made == n_steps).all(), f"{made} steps were made, not {n_steps}"
        return seconds / n_steps

    portions = [1 if apart else n_steps for apart in one_by_one] or [n_steps] * len(engines)
    cases = list(zip(engines, portions, strict=True))
    times: list[list[float]] = [[] for _ in cases]
    for case in cases:
        run(*case)  # compile
    for _ in range(rounds):
        for i, case in enumerate(cases):
            times[i].append(run(*case))
    return times
