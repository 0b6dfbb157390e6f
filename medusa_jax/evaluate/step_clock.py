"""Seconds of a decode step on this device."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.decoding.request import DecodeRequest, power_of_two, prompt_arrays
from medusa_jax.decoding.rows import Sizes, begin_row, idle
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.decoding.step import decode_step
from medusa_jax.errors import UserError
from medusa_jax.programs import program
from medusa_jax.sharding import pin_state, placed


class StepClock:
    """Times `n_steps` decode steps in one program, after one prompt.

    The text repeats itself in every second step, since a tree with spares drafts less there. All engines
    get the same number of cache slots, enough for all steps of all trees, since a step's cost depends on
    it. An assertion checks that no run ends early.

    Args:
      engines: the engines to time, or at least those with the longest path and with the most free slots.

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
        free = max(e.free_slots for e in engines)
        length = len(prompt) + self.n_steps * L + free
        self.slots = power_of_two(length, engines[0].kernels.least_slots)
        self.variables = variables
        self.request = DecodeRequest(
            prompts=[list(prompt)] * batch,
            limits=[self.n_steps * L + 1] * batch,
            temperature=[temperature] * batch,
        )

    def seconds(self, engine: Engine) -> float:
        """Seconds of a step; the first call of an engine compiles as well."""
        # Zero steps: compiles, and returns arrays that can be donated without a copy.
        state = jax.block_until_ready(
            run_steps(engine, self.variables, self.begin(engine), np.int32(0))
        )
        start = time.perf_counter()
        state = run_steps(engine, self.variables, state, np.int32(self.n_steps))
        jax.block_until_ready(state)
        seconds = time.perf_counter() - start
        steps_B, length = np.asarray(state.steps_B), int(np.max(state.length_B))
        assert (steps_B == self.n_steps).all(), (
            f"{steps_B} steps were made, not {self.n_steps}"
        )
        assert length + engine.free_slots <= self.slots, (
            f"{length} tokens in {self.slots} slots"
        )
        return seconds / self.n_steps

    def begin(self, engine: Engine) -> DecodeState:
        """The state after a prompt, with zeros instead of prefill's results, which affect no time.

        Only the step's program has to be compiled.
        """
        _, prompts = prompt_arrays(engine, self.request)
        length_B = prompts.prompt_length_B
        sizes = Sizes(prompts.output_BO.shape[1], prompts.options.end_BQ.shape[1])
        state = idle(engine.depth_only, sizes, len(length_B), self.slots)
        state = begin_row(engine.depth_only, state, prompts.options)
        state = state.replace(n_new_B=np.ones_like(length_B), length_B=length_B)
        return placed(engine.llama.mesh, state)


@program(static_argnums=0, donate_argnums=2)
def run_steps(
    engine: Engine, variables: dict[str, Any], state: DecodeState, n_steps: jax.Array
) -> DecodeState:
    """Run steps alternately after a text without repeats and after one repeated token."""

    def one(i: jax.Array, state: DecodeState) -> DecodeState:
        if state.text_BS is not None:
            different_S = (
                jnp.arange(state.text_BS.shape[1]) % engine.llama.config.vocab_size
            )
            text_BS = jnp.broadcast_to((i + 1) % 2 * different_S, state.text_BS.shape)
            state = state.replace(text_BS=text_BS.astype(state.text_BS.dtype))
        return pin_state(engine.llama.mesh, decode_step(engine, variables, state))

    state = lax.fori_loop(0, n_steps, one, state)
    return pin_state(engine.llama.mesh, state)
