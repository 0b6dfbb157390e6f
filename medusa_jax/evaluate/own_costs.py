"""How long `medusa own` will take on this machine, from a few short measurements."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from medusa_jax import programs
from medusa_jax.api import Model
from medusa_jax.evaluate.step_clock import StepClock
from medusa_jax.kept_programs import without_cache
from medusa_jax.tree.tree import Tree

# PROGRAMS: fixed cost of each part, as a multiple of compiling one decoding loop. Answers pay it once per prompt
# length. READING, LEARNING: how many times as long as its matrix products each takes. Measured on two quiet CPU cores.
PROGRAMS = {"answers": 14.0, "training": 22.0, "tree": 38.0, "comparison": 20.0}
READING, LEARNING = 1.4, 1.35
# TIMED_STEPS: `calibrate`'s timings, in plain steps. COMPARED_STEPS: plain steps that comparing a token takes.
TIMED_STEPS, COMPARED_STEPS = 700, 2.5


class Costs(NamedTuple):
    """Measured seconds.

    Attributes:
      program: compiling one decoding loop.
      step, batch_step: a plain step of one row, of a batch.
      token: a token through the backbone.
      learned: a position through heads and loss, in one training step.
    """

    program: float
    step: float
    batch_step: float
    token: float
    learned: float


class Workload(NamedTuple):
    """The work of `own`.

    Attributes:
      questions: number answered.
      sizes: number of different padded prompt lengths.
      batch: rows of a training update.
      steps: number of updates.
      decoded: steps of whole batches.
      read: prompt tokens, padding included.
      tokens: tokens of all texts.
      learned: positions that all training steps learn from.
      compared: tokens.
    """

    questions: int
    sizes: int
    batch: int
    steps: int
    decoded: int
    read: int
    tokens: int
    learned: int
    compared: int

    def seconds(self, costs: Costs) -> dict[str, float]:
        """Seconds of each part."""
        work = {
            "answers": READING * self.read * costs.token + self.decoded * costs.batch_step,
            "training": self.tokens * costs.token + LEARNING * self.learned * costs.learned,
            "tree": TIMED_STEPS * costs.step,
            "comparison": COMPARED_STEPS * self.compared * costs.step,
        }
        times = PROGRAMS | {"answers": PROGRAMS["answers"] * self.sizes}
        return {part: s + times[part] * costs.program for part, s in work.items()}


def measure(model: Model, batch: int, n_heads: int, draft_vocab: int) -> Costs:
    """Time plain steps, the compilation of their loop without caches, and a product as large as training's."""
    plain, config = model.engine(Tree.none()), model.config
    one, many = (
        StepClock([plain], model.variables, [1] * 64, batch=n, n_steps=8)
        for n in (1, batch)
    )
    store, programs.store = programs.store, None
    try:
        with without_cache():
            program = _seconds(lambda: one.seconds(plain), 1)
        many.seconds(plain)
        step, batch_step = (
            min(clock.seconds(plain) for _ in range(3)) for clock in (one, many)
        )
    finally:
        programs.store = store
    D, V = config.d_model, draft_vocab or config.vocab_size
    product, x, w = jax.jit(jnp.matmul), jnp.ones((512, D)), jnp.ones((D, V))
    weight = _seconds(lambda: product(x, w).block_until_ready(), 4) / (512 * D * V)
    attention = 2 * D * config.head_dim * (config.n_heads + config.n_kv_heads)
    n_weights = config.n_layers * (attention + 3 * D * config.d_ff)
    in_heads = n_heads * (3 * D * D + 2 * D * V) + D * V
    return Costs(program, step, batch_step, weight * n_weights, weight * in_heads)


def _seconds(call: Callable[[], object], times: int) -> float:
    """The least seconds of several calls."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
