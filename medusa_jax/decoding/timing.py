"""Seconds of a decode step on this device."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from medusa_jax.decoding.generate import (
    DecodeState,
    Engine,
    Request,
    decode_loop,
    least_slots,
    power_of_two,
    prefill,
    prefill_arguments,
)
from medusa_jax.errors import UserError
from medusa_jax.measured import in_rounds
from medusa_jax.sharding import decode_shardings


class StepClock:
    """Times `n_steps` decode steps on the device in one go, after one prompt.

    The cache has the same number of slots for all engines, with room for all steps of all trees: a
    step costs what its slots ask for. Nothing ends a run before its last step, which is checked.

    Args:
      engines: all that will be timed, or those with the longest path and the most rows.

    Raises:
      UserError: the context leaves no room for a step after the prompt.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        variables: dict[str, Any],
        prompt: Sequence[int],
        *,
        batch: int = 1,
        temperature: float = 0.0,
        n_steps: int = 16,
    ) -> None:
        context = engines[0].llama.config.max_position
        L = max(e.tree.path_length for e in engines)
        self.n_steps = min(n_steps, (context - len(prompt) - 1) // L)
        if self.n_steps < 1:
            raise UserError(
                f"a prompt of {len(prompt)} tokens leaves no room for a step of up to {L} tokens "
                f"in a context of {context}"
            )
        n_rows = max(e.n_rows for e in engines)
        self.slots = power_of_two(
            len(prompt) + self.n_steps * L + n_rows, least_slots(engines[0])
        )
        self.variables = variables
        self.shapes: dict[Engine, DecodeState] = {}
        self.request = Request(
            prompts=[list(prompt)] * batch,
            limits=[self.n_steps * L + 1] * batch,
            temperature=[temperature] * batch,
        )

    def seconds(self, engine: Engine, apart: bool = False) -> float:
        """Seconds of a step, after the compilation the first time.

        Args:
          apart: the host dispatches each step by itself, without waiting for the one before.
        """
        # No step: compiles, and gives what can be donated without a copy.
        state, _ = jax.block_until_ready(
            decode_loop(engine, self.variables, self._begin(engine), np.int32(0))
        )
        in_one_go = 1 if apart else self.n_steps
        start = time.perf_counter()
        for _ in range(self.n_steps // in_one_go):
            state, progress = decode_loop(
                engine, self.variables, state, np.int32(in_one_go)
            )
        jax.block_until_ready(progress)
        seconds = time.perf_counter() - start
        made = np.asarray(progress.steps_B)
        assert (made == self.n_steps).all(), f"{made} steps were made, not {self.n_steps}"
        return seconds / self.n_steps

    def _begin(self, engine: Engine) -> DecodeState:
        """The state after the prompt, zeros where the prompt would count: no time depends on them.

        So the step's program is the only one to compile.
        """
        _, arguments = prefill_arguments(engine, self.variables, self.request)
        if engine not in self.shapes:
            shapes = prefill.eval_shape(engine.depth_only, self.slots, *arguments)
            self.shapes[engine] = shapes.replace(sampling=None)
        _, _, length_B, limit_B, max_steps_B, stop_BQW, sampling, _ = arguments
        state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.shapes[engine])
        state = state.replace(
            sampling=sampling,
            n_new_B=np.ones_like(length_B),
            limit_B=limit_B,
            max_steps_B=max_steps_B,
            stop_BQW=stop_BQW,
            length_B=length_B,
        )
        mesh = engine.llama.mesh
        return jax.device_put(state, mesh and decode_shardings(mesh, state))


def engine_seconds(
    engines: Sequence[Engine],
    variables: dict[str, Any],
    prompt: Sequence[int],
    *,
    rounds: int = 7,
    one_by_one: Sequence[bool] = (),
    watch: Callable[[], Any] = lambda: None,
    **how: Any,
) -> list[float]:
    """Median seconds of one decode step of each engine: draft, verify, accept, commit, append.

    Every round runs every engine once, as a `StepClock` does, whose arguments the others are.

    Args:
      one_by_one: for each engine whether its steps are dispatched `apart`; by default none is.
      watch: called after each run: one of every engine to compile it, then those of the rounds.

    Raises:
      UserError: the context leaves no room for a step after the prompt.
    """
    clock = StepClock(engines, variables, prompt, **how)

    def run(engine: Engine, apart: bool) -> float:
        seconds = clock.seconds(engine, apart)
        watch()
        return seconds

    apart = one_by_one or [False] * len(engines)
    runs = [partial(run, *case) for case in zip(engines, apart, strict=True)]
    _, *times = in_rounds(runs, 1 + rounds)  # the first round compiles
    return [statistics.median(own) for own in zip(*times)]
