"""Time of a step with each size of a gated engine, measured once on a device."""

import time

import jax
import numpy as np

from medusa_jax.decoding.gate import Gate
from medusa_jax.decoding.generate import FOREVER
from medusa_jax.decoding.loop import decode_loop
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.decoding.stopping import NEVER, RUNNING
from medusa_jax.heads.state import rewind_state
from medusa_jax.sharding import Params, placed

# Seconds to spend, most steps of a timed run, and bounds of the number of interleaved rounds.
SECONDS, STEPS, ROUNDS = 1.0, 8, (3, 15)


class StepTimer:
    """Times runs of steps that begin at the same place of a text.

    It runs the decode loop itself, so nothing else is compiled.

    Args:
      state: a prefilled one, consumed.
      gate: of the request, before its text.
    """

    def __init__(
        self, engine: Engine, variables: Params, state: DecodeState, gate: Gate
    ) -> None:
        room = state.cache.slots - engine.n_rows - STEPS * engine.tree.path_length
        self.engine, self.variables, self.gate = engine, variables, gate
        self.state = state
        # On a CPU this process's own computing time, which other processes hardly change.
        on_cpu = {device.platform for device in state.length_B.devices()} == {"cpu"}
        self.now = time.process_time if on_cpu else time.perf_counter
        self.length_B = np.clip(np.asarray(state.length_B), 1, max(1, room))

    def seconds(self, index: int, steps: int) -> float:
        """Seconds of a step with one size, the mean of a run."""
        B, stops_BQW = len(self.length_B), np.full_like(self.state.stop_BQW, NEVER)
        state = self.state.replace(
            drafter=rewind_state(self.state.drafter, self.length_B),
            length_B=self.length_B,
            n_new_B=np.ones(B, np.int32),
            limit_B=np.full(B, FOREVER, np.int32),
            stop_BQW=stops_BQW,
            status_B=np.full(B, RUNNING, np.int32),
            gate=self.gate.always(index),
        )
        state = jax.block_until_ready(placed(self.engine.llama.mesh, state))
        start = self.now()
        self.state, _ = jax.block_until_ready(
            decode_loop(self.engine, self.variables, state, np.int32(steps))
        )
        seconds = self.now() - start
        assert self.state.gate is not None
        return seconds / int(self.state.gate.steps_N[index])


def step_costs(
    engine: Engine, variables: Params, state: DecodeState, gate: Gate
) -> list[float]:
    """Time of a step with each size over a plain step's, ascending: medians of the faster half of interleaved rounds.

    Other work on the machine comes in bursts and only adds time.

    Args:
      state, gate: as for `StepTimer`.
    """
    timer, sizes = StepTimer(engine, variables, state, gate), range(len(engine.gated))
    first = sum(timer.seconds(index, 1) for index in sizes)  # reads all weights once
    steps = int(np.clip(SECONDS / ROUNDS[0] / first, 1, STEPS))
    rounds: list[list[float]] = []
    begin = time.perf_counter()
    while len(rounds) < ROUNDS[1]:
        rounds.append([timer.seconds(index, steps) for index in sizes])
        if len(rounds) >= ROUNDS[0] and time.perf_counter() - begin > SECONDS:
            break
    seconds_RN = np.array(sorted(rounds, key=sum)[: (len(rounds) + 1) // 2])
    ratio_N = np.median(seconds_RN / seconds_RN[:, :1], axis=0)
    # More nodes never take less time: else noise decided.
    return [round(float(ratio), 3) for ratio in np.maximum.accumulate(ratio_N)]
