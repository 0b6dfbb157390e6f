"""One training step: gradients of a batch, the update, and their shardings."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.stages import Compiled

from medusa_jax.config import Config
from medusa_jax.console import announced
from medusa_jax.devices.platforms import TRAINING_OPTIONS, platform
from medusa_jax.model.barrier import depend_on, regather
from medusa_jax.sharding import (
    PyTree,
    batch_sharding,
    local_rows,
    param_shardings,
    replicated,
)
from medusa_jax.training import losses
from medusa_jax.training.hidden_store import batch_type, stored_width
from medusa_jax.training.optim.optimizer import keep_if
from medusa_jax.training.partition import hidden_width
from medusa_jax.training.stage import Stage


class TrainState(NamedTuple):
    """The state that a step updates. `updates` counts the steps that were not skipped."""

    step: jax.Array
    updates: jax.Array
    params: PyTree
    opt: PyTree


class Shapes(NamedTuple):
    """A training step and its arguments, as shapes with shardings.

    Attributes:
      step: step(state, frozen, batch).
    """

    step: Callable
    state: TrainState
    frozen: PyTree
    batch: PyTree
    mesh: Mesh


def make_step(
    stage: Stage,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    seed: int,
    mesh: Mesh | None = None,
) -> Callable[[TrainState, PyTree, PyTree], tuple[TrainState, PyTree]]:
    """step(state, frozen, batch) -> (state, metrics); batch arrays are [A, B / A, T].

    The gradients of the A microbatches add up: each divides by the counts of the whole batch.
    Each microbatch gathers weights over fsdp again: XLA would gather the weights of all layers before the loop
    and keep them.

    A loss or gradient that is not finite leaves parameters and optimizer unchanged.
    """

    def step(state: TrainState, frozen: PyTree, batch: PyTree) -> tuple[TrainState, PyTree]:
        counts_K = losses.pair_counts(batch, stage.offsets)
        lambda_0 = stage.lambda_0(state.step)
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        gradient = jax.value_and_grad(stage.loss, has_aux=True)
        A = batch["tokens"].shape[0]

        def microbatch_gradient(micro: PyTree, i: jax.Array) -> PyTree:
            key = jax.random.fold_in(step_key, i)
            inputs = losses.StepInputs(micro, counts_K, key, lambda_0)
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

            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype),
                jax.eval_shape(microbatch_gradient, *first),
            )
            ((loss, sums), grads), _ = jax.lax.scan(body, zeros, (batch, jnp.arange(A)))
        norm = optax.tree.norm(grads)
        ok = jnp.isfinite(loss) & jnp.isfinite(norm)
        # Otherwise XLA unpacks the moments of all parameters before the first gradient exists.
        moments = depend_on(state.opt, norm)
        updates, opt = optimizer.update(grads, moments, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = summary(stage, sums, counts_K) | {
            "objective": loss,
            "gradient_norm": norm,
            "lr": jnp.asarray(schedule(state.updates), jnp.float32),
            "skipped": ~ok,
        }
        params, opt = keep_if(ok, (params, opt), (state.params, state.opt))
        return TrainState(state.step + 1, state.updates + ok, params, opt), metrics

    return step


def summary(stage: Stage, sums: losses.Sums, counts_K: jax.Array) -> dict[str, jax.Array]:
    """Means over the counted pairs: loss in nats, top-1 and top-5 accuracy, each [K].

    With a draft vocabulary `inside` is the share of pairs whose token is in it; the loss is the mean over these,
    the others are misses.

    If heads train together with the backbone, its metrics are `lm_loss`, `lm_top1` and `lm_top5`, and
    `lm_objective` is the minimised term L_LM (cross-entropy or KL).
    """
    n = jnp.maximum(counts_K, 1.0)
    scored = jnp.maximum(sums.scored, 1.0)
    means = {"loss": sums.nll / scored, "top1": sums.top1 / n, "top5": sums.top5 / n}
    inside = {"inside": sums.scored / n} if stage.draft_vocab else {}
    if stage.offsets[0] != 1 or len(stage.offsets) == 1:
        return means | inside
    lm = {f"lm_{name}": x[0] for name, x in means.items()}
    lm_sums = jax.tree.map(lambda x: x[0], sums)
    lm["lm_objective"] = losses.next_token_mean(lm_sums, counts_K[0])
    return {name: x[1:] for name, x in (means | inside).items()} | lm


def state_shardings(mesh: Mesh, abstract: TrainState) -> TrainState:
    """Shardings: moments like their parameters (their paths have the same end), scalars replicated."""
    return param_shardings(mesh, abstract)


def local_numbers(mesh: Mesh, batch_size: int, accumulation: int) -> np.ndarray:
    """Indices, ascending, of the batch's rows that this process passes to `microbatches`."""
    micro = batch_size // accumulation
    starts = micro * np.arange(accumulation)
    return (starts[:, None] + local_rows(mesh, micro)[None, :]).reshape(-1)


def microbatches(mesh: Mesh, batch: dict[str, np.ndarray], accumulation: int) -> PyTree:
    """Host rows of this process -> global arrays [A, B / A, T], rows split over the mesh.

    Args:
      batch: arrays [n, T] of the rows with indices `local_numbers`.
    """
    sharding = batch_sharding(mesh)

    def place(x: np.ndarray) -> jax.Array:
        split = x.reshape(accumulation, -1, *x.shape[1:])
        return jax.make_array_from_process_local_data(sharding, split)

    return jax.tree.map(place, batch)


def abstract_batch(cfg: Config, mesh: Mesh) -> PyTree:
    """Shapes and placement of a batch."""
    t = cfg.train
    shape = (t.accumulation, t.batch_size // t.accumulation, cfg.data.seq_len)
    sharding = batch_sharding(mesh)
    kinds = {
        "tokens": "int32",
        "positions": "int32",
        "segment_ids": "int32",
        "counted": "bool",
    }
    batch = {
        name: jax.ShapeDtypeStruct(shape, np.dtype(kind), sharding=sharding)
        for name, kind in kinds.items()
    }
    if cfg.data.cache_features:
        kind, D = cfg.data.cache_features, cfg.model.arch.d_model
        shape_W = (*shape, stored_width(kind, D, hidden_width(cfg)))
        batch["hidden"] = jax.ShapeDtypeStruct(shape_W, batch_type(kind), sharding=sharding)
    return batch


def init_state(
    stage: Stage, optimizer: optax.GradientTransformation, mesh: Mesh, frozen: PyTree, seed: int,
    start: PyTree = None,
) -> TrainState:  # fmt: skip
    """The state of step 0; groups that are not in `start` are initialised on their devices."""
    start = start or {}
    key, given = jax.random.key(seed), frozen | start
    shardings = param_shardings(mesh, jax.eval_shape(stage.init, key, given))
    params = start | jax.jit(stage.init, out_shardings=shardings)(key, given)
    shapes = jax.eval_shape(optimizer.init, params)
    opt = jax.jit(optimizer.init, out_shardings=param_shardings(mesh, shapes))(params)
    zero, updates = (jax.device_put(np.int32(0), replicated(mesh)) for _ in range(2))
    return TrainState(zero, updates, params, opt)


def compile_step(
    step: Callable, state: TrainState, frozen: PyTree, batch: PyTree, mesh: Mesh
) -> Compiled:
    """Compile the step; its arguments may be shapes. The state is donated."""
    out = (state_shardings(mesh, state), replicated(mesh))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    with (
        announced("compiling the training step (this can take minutes)"),
        jax.set_mesh(mesh),  # `model/kernels.py` splits attention over it
    ):
        options = TRAINING_OPTIONS.get(platform())
        return jitted.lower(state, frozen, batch).compile(compiler_options=options)
