"""The training loop: one jitted step, two stages.

"backbone" trains every parameter of a Llama as a language model, "medusa1" trains draft heads
on a frozen one (Medusa 2.2.1). What is trained and what is frozen are two separate trees from
the start: only the first is differentiated, optimised and saved.
"""

import dataclasses
import functools
import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from medusa_jax.config import Config
from medusa_jax.errors import UserError
from medusa_jax.heads import Base, make_drafter
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.sharding import init_sharded, make_mesh, param_shardings, replicated
from medusa_jax.training import export, losses
from medusa_jax.training.checkpoint import Checkpoints
from medusa_jax.training.data import TokenRows
from medusa_jax.training.partition import keep_if, make_optimizer, make_schedule
from medusa_jax.training.progress import Progress, announced, say

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

        def lm(params: Tree, frozen: Tree, batch: Tree, counts: jax.Array, key: jax.Array) -> Any:
            return losses.backbone_loss(params, llama, batch, counts, train.loss_chunk)

        return Stage((1,), lm, lambda key, frozen: init_params(cfg.model.arch, key))

    drafter = make_drafter(cfg.heads, cfg.model.arch)
    llama = Llama(cfg.model.arch, dtype)

    def heads(params: Tree, frozen: Tree, batch: Tree, counts: jax.Array, key: jax.Array) -> Any:
        base = Base(llama, frozen)
        return losses.head_loss(
            params, drafter, base, batch, counts, train.loss_chunk, train.lambda_decay, key
        )

    aheads = tuple(k + 2 for k in range(cfg.heads.n_heads))
    return Stage(aheads, heads, lambda key, frozen: drafter.init(key, Base(llama, frozen)))


def make_step(
    stage: Stage, optimizer: optax.GradientTransformation, schedule: optax.Schedule, seed: int
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
            (loss, sums), grads = one(jax.tree.map(lambda x: x[0], batch), jnp.zeros((), jnp.int32))
        else:

            def body(total: Tree, xs: Tree) -> tuple[Tree, None]:
                return jax.tree.map(jnp.add, total, one(*xs)), None

            first = (jax.tree.map(lambda x: x[0], batch), jnp.zeros((), jnp.int32))
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, *first)
            )
            ((loss, sums), grads), _ = jax.lax.scan(body, zeros, (batch, jnp.arange(A)))
        norm = optax.global_norm(grads)
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
    kinds = {"tokens": "int32", "positions": "int32", "segment_ids": "int32", "counted": "bool"}
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
        params = init_sharded(mesh, lambda key: stage.init(key, frozen), jax.random.key(seed))
    shapes = jax.eval_shape(optimizer.init, params)
    opt = jax.jit(optimizer.init, out_shardings=param_shardings(mesh, shapes))(params)
    zero, updates = (jax.device_put(np.int32(0), replicated(mesh)) for _ in range(2))
    return TrainState(zero, updates, params, opt)


class Evaluator:
    """Mean loss and accuracies on the first `eval_samples` rows of held-out text."""

    def __init__(self, cfg: Config, stage: Stage, mesh: Mesh, rows: TokenRows):
        self.rows, self.mesh = rows, mesh
        self.size = cfg.train.batch_size // cfg.train.accumulation
        self.total = min(cfg.data.eval_samples, rows.rows)

        @jax.jit
        def sums(params: Tree, frozen: Tree, batch: Tree) -> Tree:
            batch = jax.tree.map(lambda x: x[0], batch)
            counts_K = losses.pair_counts(batch, stage.aheads)
            _, out = stage.loss(params, frozen, batch, counts_K, None)
            return out, counts_K

        self.sums = sums

    def __call__(self, params: Tree, frozen: Tree) -> dict[str, Any]:
        share = self.size // jax.process_count()
        total = None
        for first in range(0, self.total, self.size):
            batch = self.rows.batch(first + share * jax.process_index(), share)
            # Rows beyond the last sample are blanked, not counted twice.
            numbers = first + share * jax.process_index() + np.arange(share)
            batch["segment_ids"][numbers >= self.total] = 0
            out = self.sums(params, frozen, microbatches(self.mesh, batch, 1))
            total = out if total is None else jax.tree.map(jnp.add, total, out)
        return to_host(summary(*total))


def to_host(metrics: Tree) -> dict[str, Any]:
    """Plain numbers, lists of them for arrays."""
    return {name: np.asarray(x).tolist() for name, x in metrics.items()}


def total_steps(cfg: Config, rows: int) -> int:
    """Updates in the run: `train.steps`, else `train.epochs` over so many rows."""
    return cfg.train.steps or max(cfg.train.epochs * rows // cfg.train.batch_size, 1)


def train(cfg: Config) -> dict[str, Any]:
    """Run (or go on with) the training that `cfg` describes; returns the last metrics.

    Raises:
      UserError: anything wrong with the configuration, the data or the machine.
    """
    from medusa_jax.training import prepare

    mesh = make_mesh(cfg.mesh)
    setup = export.load(cfg, mesh)
    cfg.model.arch = setup.arch
    prepare.check(cfg, mesh)
    vocab = cfg.model.arch.vocab_size
    rows = TokenRows(prepare.token_directory(cfg, cfg.data.source), cfg.data, vocab)
    held_out = None
    if cfg.data.eval_source:
        directory = prepare.token_directory(cfg, cfg.data.eval_source)
        held_out = TokenRows(directory, cfg.data, vocab, shuffle=False)

    steps = total_steps(cfg, rows.rows)
    stage = make_stage(cfg)
    schedule = make_schedule(cfg.optim, steps)
    optimizer = make_optimizer(cfg.optim, schedule)
    with announced("initialising"):
        state = init_state(
            stage, optimizer, mesh, setup.frozen, cfg.train.seed, setup.trainable
        )
    checkpoints = Checkpoints(cfg.workdir, cfg.train.keep_checkpoints)
    best = float("inf")
    if checkpoints.latest is not None:
        params, opt, data, meta = checkpoints.restore(state.params, state.opt)
        prepare.check_resume(data, cfg, rows)
        counters = (np.int32(meta["step"]), np.int32(meta["updates"]))
        step, updates = jax.device_put(counters, replicated(mesh))
        state, best = TrainState(step, updates, params, opt), meta["best"]
        say(f"resuming from step {meta['step']} of {steps} in {cfg.workdir}")
    elif jax.process_index() == 0:
        export.write_json(os.path.join(cfg.workdir, "config.json"), dataclasses.asdict(cfg))
    run = Run(cfg, mesh, stage, setup, rows, checkpoints, steps, best)
    step_fn = make_step(stage, optimizer, schedule, cfg.train.seed)
    compiled = compile_step(step_fn, state, setup.frozen, abstract_batch(cfg, mesh), mesh)
    evaluator = Evaluator(cfg, stage, mesh, held_out) if held_out else None
    try:
        return run.loop(compiled, state, evaluator)
    finally:
        checkpoints.close()


def compile_step(step: Callable, state: TrainState, frozen: Tree, batch: Tree, mesh: Mesh) -> Any:
    """The step as an executable; its arguments may be shapes. The state is donated."""
    out = (state_shardings(mesh, state), None)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    with announced("compiling the training step"):
        return jitted.lower(state, frozen, batch).compile()


class Run:
    """One run in progress: the loop, its saves, and how it ends."""

    def __init__(
        self, cfg: Config, mesh: Mesh, stage: Stage, setup: "export.Setup", rows: TokenRows,
        checkpoints: Checkpoints, steps: int, best: float,
    ):  # fmt: skip
        self.cfg, self.mesh, self.stage, self.setup, self.rows = cfg, mesh, stage, setup, rows
        self.checkpoints, self.steps, self.best = checkpoints, steps, best
        self.bad_in_row = self.bad = 0
        self.stop = False

    def loop(self, step_fn: Callable, state: TrainState, evaluator: Evaluator | None) -> dict:
        """Dispatch step n, then look at step n - 1: the device never waits for the host."""
        train = self.cfg.train
        start = int(np.asarray(state.step))
        share = train.batch_size // jax.process_count()
        tokens = train.batch_size * self.cfg.data.seq_len
        self.progress = Progress(self.cfg.workdir, start, self.steps, tokens)
        previous = signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop", True))
        last: dict[str, Any] = {}
        try:
            pending = None
            for n in range(start + 1, self.steps + 1):
                first = (n - 1) * train.batch_size + share * jax.process_index()
                batch = microbatches(self.mesh, self.rows.batch(first, share), train.accumulation)
                state, metrics = step_fn(state, self.setup.frozen, batch)
                last = self.look(pending) or last
                pending = (n, metrics)
                evaluate = evaluator and (n % train.eval_every == 0 or n == self.steps)
                if evaluate or n % train.save_every == 0 or n == self.steps or self.stop:
                    last, pending = self.look(pending) or last, None
                    with self.progress.aside():
                        if evaluate:
                            self.evaluate(n, evaluator(state.params, self.setup.frozen), state)
                        self.save(n, state)
                if self.stop:
                    say(f"stopped by SIGTERM after step {n}; the same command goes on from there")
                    return last
            export.result(self.cfg, self.setup, state.params, "export", self.recipe(self.steps))
            say(f"done: {self.steps} steps; the result is in {self.cfg.workdir}/export")
            return last
        finally:
            signal.signal(signal.SIGTERM, previous)
            self.progress.close()

    def look(self, pending: tuple[int, Tree] | None) -> dict[str, Any] | None:
        """Record the metrics of a finished step; stops the run when too many were bad."""
        if pending is None:
            return None
        n, metrics = pending
        skipped = bool(np.asarray(metrics["skipped"]))
        self.bad_in_row = self.bad_in_row + 1 if skipped else 0
        self.bad += skipped
        if skipped:
            say(f"step {n}: loss or gradient is not finite, update skipped ({self.bad} in all)")
        due = n % self.cfg.train.log_every == 0 or n in (1, self.steps)
        record = to_host(metrics) | {"bad_steps": self.bad}
        if due:
            self.progress.train(n, record)
        if self.bad_in_row >= self.cfg.train.max_bad_steps:
            at = self.checkpoints.latest
            where = "there is no checkpoint yet" if at is None else f"checkpoint {at} is good"
            raise UserError(
                f"{self.bad_in_row} steps in a row had a loss or gradient that is not finite, "
                f"the last one step {n}; {where}; lower optim.lr or look at the data"
            )
        return record

    def evaluate(self, n: int, record: dict[str, Any], state: TrainState) -> None:
        """Log held-out numbers; the best so far is exported."""
        self.progress.evaluation(n, record)
        weights = [self.cfg.train.lambda_decay**k for k in range(len(record["loss"]))]
        score = float(np.dot(weights, record["loss"]))
        if score < self.best:
            self.best = score
            recipe = self.recipe(n) | {"held_out": record}
            export.result(self.cfg, self.setup, state.params, "best", recipe)

    def save(self, n: int, state: TrainState) -> None:
        meta = {"step": n, "updates": int(np.asarray(state.updates)), "best": self.best}
        data = {"step": n, "rows": self.rows.rows, "batch_size": self.cfg.train.batch_size}
        with announced("saving a checkpoint"):
            self.checkpoints.save(n, state.params, state.opt, data, meta)

    def recipe(self, n: int) -> dict[str, Any]:
        return {"step": n, "steps": self.steps, "config": dataclasses.asdict(self.cfg)}
