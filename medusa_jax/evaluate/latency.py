"""Step latency on this device, from interleaved runs so that drift does not skew ratios."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from medusa_jax.api import Model
from medusa_jax.decoding.generate import (
    DecodeState,
    Engine,
    Request,
    begin,
    decode_loop,
    grow,
)
from medusa_jax.decoding.timing import engine_seconds
from medusa_jax.errors import UserError
from medusa_jax.tree import Tree


def step_seconds(
    model: Model,
    trees: Sequence[Tree],
    prompt: Sequence[int],
    *,
    batch: int = 1,
    acceptance: str = "greedy",
    temperature: float = 0.0,
    n_steps: int = 16,
    rounds: int = 7,
    watch: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Median seconds of one decode step with each tree: draft, verify, accept, commit.

    See `decoding.timing.engine_seconds`.
    """
    engines = [model.engine(tree, acceptance, temperature > 0) for tree in trees]
    return engine_seconds(
        engines, model.variables_by(engines[0].acceptance), prompt, batch=batch, temperature=temperature,
        n_steps=n_steps, rounds=rounds, watch=watch,
    )  # fmt: skip


def cache_check(
    model: Model,
    prompt: Sequence[int],
    *,
    tree: Tree | None = None,
    small: int = 128,
    large: int = 4096,
    rounds: int = 15,
) -> dict[str, dict[str, float]]:
    """Time a step after a short text, for a request limited to `small` and to `large` slots.

    The cache grows with the text, so while the text is short a request that may fill 4096 slots
    should cost the same as one of 128. For contrast, a `preallocated` step attends to all large slots
    from the start.

    Args:
      prompt: the text; together with the steps timed here it must fit `small`.

    Returns: per case the median `seconds` of a step from interleaved runs, and `bytes` that the
      compiled loop accesses per step by XLA's cost analysis.
    """
    tree = model.tree if tree is None else tree
    M, L = tree.n_nodes, tree.path_length
    n_steps = (small - len(prompt) - M) // L
    if n_steps < 1:
        raise UserError(f"a prompt of {len(prompt)} tokens leaves no step in {small} slots")
    engine = Engine(model.llama, model.drafter, tree)
    cases = {"small": (small, 0), "large": (large, 0), "preallocated": (large, large)}

    def start(case: str) -> DecodeState:
        needed, slots = cases[case]
        request = Request(prompts=[list(prompt)], limits=[needed - len(prompt) - M])
        state, ladder = begin(engine, model.variables, request)
        assert ladder[0] == small and ladder[-1] == needed
        return grow(engine.depth_only, slots, state) if slots else state

    times: dict[str, list[float]] = {case: [] for case in cases}
    found: dict[str, dict[str, float]] = {}
    steps = np.int32(n_steps)
    for case in cases:
        lowered = decode_loop.lower(engine, model.variables, start(case), steps)
        costs = lowered.compile().cost_analysis() or {}
        found[case] = {"bytes": float(costs["bytes accessed"])}
    for _ in range(rounds + 1):  # the first one compiles
        for case in cases:
            state = jax.block_until_ready(start(case))
            began = time.perf_counter()
            _, progress = decode_loop(engine, model.variables, state, steps)
            jax.block_until_ready(progress)
            times[case].append((time.perf_counter() - began) / n_steps)
    for case, seconds in times.items():
        found[case]["seconds"] = statistics.median(seconds[1:])
    return found
