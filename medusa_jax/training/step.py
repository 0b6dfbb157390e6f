"""One training step: what is trained, the loss of a batch, the update, its placement.

"backbone" trains every parameter of a Llama as a language model, "medusa1" trains draft heads
on a frozen one (Medusa 2.2.1). What is trained and what is frozen are two separate trees from
the start: only the first is differentiated, optimised and saved.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from medusa_jax.config import Config
from medusa_jax.console import announced
from medusa_jax.heads import Base, make_drafter
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.sharding import init_sharded, param_shardings, replicated
from medusa_jax.training import losses
from medusa_jax.training.partition import keep_if

Tree = Any


class TrainState(NamedTuple):
    """What a step changes. `step` counts batches, `updates` those that were not skipped."""

    step: jax.Array
    updates: jax.Array
    params: Tree
    opt: Tree


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is trained: shapes, initial values and the loss of one microbatch.

    Attributes:
      aheads: how many tokens ahead each of the K losses looks.
      loss: (params, frozen, microbatch, counts_K, dropout key) -> (loss, Sums).
      init: (key, frozen) -> trainable parameters.
    """

    aheads: tuple[int, ...]
    loss: Callable[..., tuple[jax.Array, losses.Sums]]
    init: Callable[[jax.Array, Tree], Tree]


def make_stage(cfg: Config) -> Stage:
    """The stage that `cfg.train.stage` names, on the backbone shape `cfg.model.arch`."""
    train = cfg.train
    dtype = jnp.dtype(train.dtype)
    if train.stage == "backbone":
        llama = Llama(cfg.model.arch, dtype, remat=train.remat)

        def lm(
            params: Tree, frozen: Tree, batch: Tree, counts: jax.Array, key: jax.Array
        ) -> Any:
            return losses.backbone_loss(params, llama, batch, counts, train.loss_chunk)

        return Stage((1,), lm, lambda key, frozen: init_params(cfg.model.arch, key))

    drafter = make_drafter(cfg.heads, cfg.model.arch)
    llama = Llama(cfg.model.arch, dtype)

    def heads(
        params: Tree, frozen: Tree, batch: Tree, counts: jax.Array, key: jax.Array
    ) -> Any:
        base = Base(llama, frozen)
        return losses.head_loss(
            params, drafter, base, batch, counts, train.loss_chunk, train.lambda_decay, key
        )

    aheads = tuple(k + 2 for k in range(cfg.heads.n_heads))
    return Stage(aheads, heads, lambda key, frozen: drafter.init(key, Base(llama, frozen)))


def make_step(
    stage: Stage,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    seed: int,
) -> Callable[[TrainState, Tree, Tree], tuple[TrainState, Tree]]:
    """step(state, frozen, batch) -> (state, metrics); batch arrays are [A, B / A, T].

    The gradients of the A microbatches add up: each divides by the counts of the whole batch.
    A loss or gradient that is not finite leaves parameters and optimizer as they were.
    """

    def step(state: TrainState, frozen: Tree, batch: Tree) -> tuple[TrainState, Tree]:
        counts_K = losses.pair_counts(batch, stage.aheads)
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        gradient = jax.value_and_grad(stage.loss, has_aux=True)
        A = batch["tokens"].shape[0]

        def one(micro: Tree, i: jax.Array) -> Tree:
            key = jax.random.fold_in(step_key, i)
            return gradient(state.params, frozen, micro, counts_K, key)

        if A == 1:
            (loss, sums), grads = one(
                jax.tree.map(lambda x: x[0], batch), jnp.zeros((), jnp.int32)
            )
        else:

            def body(total: Tree, xs: Tree) -> tuple[Tree, None]:
                return jax.tree.map(jnp.add, total, one(*xs)), None

            first = (jax.tree.map(lambda x: x[0], batch), jnp.zeros((), jnp.int32))
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, *first)
            )
            ((loss, sums), grads), _ = jax.lax.scan(body, zeros, (batch, jnp.arange(A)))
        norm = optax.tree.norm(grads)
        ok = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, opt = optimizer.update(grads, state.opt, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = summary(sums, counts_K) | {
            "objective": loss,
            "gradient_norm": norm,
            "lr": jnp.asarray(schedule(state.updates), jnp.float32),
            "skipped": ~ok,
        }
        params, opt = keep_if(ok, (params, opt), (state.params, state.opt))
        return TrainState(state.step + 1, state.updates + ok, params, opt), metrics

    return step


def summary(sums: losses.Sums, counts_K: jax.Array) -> dict[str, jax.Array]:
    """Means over the counted pairs, each [K]: loss in nats, top-1 and top-5 accuracy."""
    n = jnp.maximum(counts_K, 1.0)
    return {"loss": sums.loss / n, "top1": sums.top1 / n, "top5": sums.top5 / n}


def state_shardings(mesh: Mesh, abstract: TrainState) -> TrainState:
    """Moments lie where their parameters do (their paths end alike), scalars everywhere."""
    return param_shardings(mesh, abstract)


def microbatches(mesh: Mesh, batch: dict[str, np.ndarray], accumulation: int) -> Tree:
    """Host rows of this process [B, T] -> global arrays [A, B / A, T], rows over the mesh."""
    sharding = NamedSharding(mesh, P(None, ("data", "fsdp")))

    def place(x: np.ndarray) -> jax.Array:
        split = x.reshape(accumulation, -1, *x.shape[1:])
        return jax.make_array_from_process_local_data(sharding, split)

    return jax.tree.map(place, batch)


def abstract_batch(cfg: Config, mesh: Mesh) -> Tree:
    """Shapes and placement of a batch."""
    t = cfg.train
    shape = (t.accumulation, t.batch_size // t.accumulation, cfg.data.seq_len)
    sharding = NamedSharding(mesh, P(None, ("data", "fsdp")))
    kinds = {
        "tokens": "int32",
        "positions": "int32",
        "segment_ids": "int32",
        "counted": "bool",
    }
    return {
        name: jax.ShapeDtypeStruct(shape, np.dtype(kind), sharding=sharding)
        for name, kind in kinds.items()
    }


def init_state(
    stage: Stage, optimizer: optax.GradientTransformation, mesh: Mesh, frozen: Tree, seed: int,
    params: Tree = None,
) -> TrainState:  # fmt: skip
    """Step 0; parameters are initialised where they belong unless they are given."""
    if params is None:
        params = init_sharded(
            mesh, lambda key: stage.init(key, frozen), jax.random.key(seed)
        )
    shapes = jax.eval_shape(optimizer.init, params)
    opt = jax.jit(optimizer.init, out_shardings=param_shardings(mesh, shapes))(params)
    zero, updates = (jax.device_put(np.int32(0), replicated(mesh)) for _ in range(2))
    return TrainState(zero, updates, params, opt)


def compile_step(
    step: Callable, state: TrainState, frozen: Tree, batch: Tree, mesh: Mesh
) -> Any:
    """The step as an executable; its arguments may be shapes. The state is donated."""
    out = (state_shardings(mesh, state), None)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    with announced("compiling the training step (this can take minutes)"):
        return jitted.lower(state, frozen, batch).compile()
