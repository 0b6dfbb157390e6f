"""Seconds of decode steps with several trees, interleaved."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from medusa_jax.api import Model
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.timing import StepClock
from medusa_jax.evaluate.race import in_rounds
from medusa_jax.tree.tree import Tree


def step_seconds(
    model: Model,
    trees: Sequence[Tree],
    prompt: Sequence[int],
    *,
    batch: int = 1,
    temperature: float = 0.0,
    n_steps: int = 16,
    rounds: int = 7,
    watch: Callable[[], object] = lambda: None,
) -> list[float]:
    """Median seconds of one decode step with each tree: draft, verify, accept, commit, append.

    Runs of `n_steps` steps are interleaved, after one round that compiles.

    Args:
      watch: called after each run.

    Raises:
      UserError: the context leaves no room for a step after the prompt.
    """
    engines = [model.engine(tree, sampled=temperature > 0) for tree in trees]
    clock = StepClock(
        engines,
        model.variables,
        prompt,
        batch=batch,
        temperature=temperature,
        n_steps=n_steps,
    )

    def run(engine: Engine) -> float:
        seconds = clock.seconds(engine)
        watch()
        return seconds

    _, *times = in_rounds([partial(run, engine) for engine in engines], 1 + rounds)
    return [statistics.median(own) for own in zip(*times)]
