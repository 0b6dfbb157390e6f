"""The training state, and the step that updates it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from medusa_jax.model.barrier import depend_on, regather
from medusa_jax.sharding import PyTree, param_shardings, replicated
from medusa_jax.training.losses.pairs import StepInputs, draw_anchors, pair_counts
from medusa_jax.training.stage import Stage


class TrainState(NamedTuple):
    """The state that a step updates. `updates` counts the steps that were not skipped."""

    step: jax.Array
    updates: jax.Array
    params: PyTree
    opt: PyTree


def init_state(
    stage: Stage, optimizer: optax.GradientTransformation, mesh: Mesh, frozen: PyTree, seed: int,
    start: PyTree = None,
) -> TrainState:  # fmt: skip
    """The state of step 0; groups that are not in `start` are initialised on their devices."""
    start = start or {}
    key, existing = jax.random.key(seed), frozen | start
    shardings = param_shardings(mesh, jax.eval_shape(stage.init, key, existing))
    params = start | jax.jit(stage.init, out_shardings=shardings)(key, existing)
    shapes = jax.eval_shape(optimizer.init, params)
    opt = jax.jit(optimizer.init, out_shardings=param_shardings(mesh, shapes))(params)
    zero, updates = (jax.device_put(np.int32(0), replicated(mesh)) for _ in range(2))
    return TrainState(zero, updates, params, opt)


def make_step(
    stage: Stage, optimizer: optax.GradientTransformation, schedule: optax.Schedule, seed: int,
    mesh: Mesh | None = None,
) -> Callable[[TrainState, PyTree, PyTree], tuple[TrainState, PyTree]]:  # fmt: skip
    """step(state, frozen, batch) -> (state, metrics); batch arrays are [A, B / A, T].

    The gradients of the A microbatches add up: each divides by the counts of the whole batch.
    Each microbatch gathers weights over fsdp again; otherwise XLA would gather all layers' weights before the
    loop and keep them.

    A loss or gradient that is not finite leaves parameters and optimizer unchanged.
    """
    gradient = jax.value_and_grad(stage.loss, has_aux=True)

    def step(state: TrainState, frozen: PyTree, batch: PyTree) -> tuple[TrainState, PyTree]:
        lambda_0 = stage.lambda_0(state.step)
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        if stage.anchors:
            batch = batch | {"anchors": draw_anchors(step_key, batch, stage.anchors)}
        counts_K = pair_counts(batch, stage.offsets)
        A = batch["tokens"].shape[0]

        def microbatch_gradient(micro: PyTree, i: jax.Array) -> PyTree:
            key = jax.random.fold_in(step_key, i)
            inputs = StepInputs(micro, counts_K, key, lambda_0)
            weights = (state.params, frozen)
            if A > 1:
                weights = regather(weights, i, mesh)
            return gradient(*weights, inputs)

        first = (jax.tree.map(lambda x: x[0], batch), jnp.zeros((), jnp.int32))
        if A == 1:
            (loss, sums), grads = microbatch_gradient(*first)
        else:

            def body(total: PyTree, xs: PyTree) -> tuple[PyTree, None]:
                return jax.tree.map(jnp.add, total, microbatch_gradient(*xs)), None

            shapes = jax.eval_shape(microbatch_gradient, *first)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            ((loss, sums), grads), _ = jax.lax.scan(body, zeros, (batch, jnp.arange(A)))
        norm = optax.tree.norm(grads)
        ok = jnp.isfinite(loss) & jnp.isfinite(norm)
        # Otherwise XLA unpacks the moments of all parameters before the first gradient exists.
        moments = depend_on(state.opt, norm)
        updates, opt = optimizer.update(grads, moments, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = stage.metrics(sums, counts_K) | {
            "objective": loss,
            "gradient_norm": norm,
            "lr": jnp.asarray(schedule(state.updates), jnp.float32),
            "skipped": ~ok,
        }
        new, old = (params, opt), (state.params, state.opt)
        params, opt = jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)
        return TrainState(state.step + 1, state.updates + ok, params, opt), metrics

    return step
