"""Training, from a configuration to exported heads: read it from top to bottom.

`train` makes a `Run` (models, text, stage, state), whose `loop` dispatches steps (`make_step`), evaluates, saves
and exports.
"""

import dataclasses
import importlib
import os
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from medusa_jax import hosts
from medusa_jax.config import Config
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.files.hub import refuse_model
from medusa_jax.model.barrier import depend_on, regather
from medusa_jax.sharding import PyTree, local_rows, make_mesh, param_shardings, replicated
from medusa_jax.training import checks, estimate, losses, resume
from medusa_jax.training.checkpoint import Checkpoints
from medusa_jax.training.data import sources
from medusa_jax.training.data.rows import Rows, batches, mix, read
from medusa_jax.training.optim.optimizer import make_optimizer, make_schedule
from medusa_jax.training.partition import trained_groups
from medusa_jax.training.placement import (
    batch_shapes,
    compile_step,
    local_numbers,
    microbatches,
    placed_shapes,
)
from medusa_jax.training.run_log import RunLog
from medusa_jax.training.setup import draft_vocab, export, load_setup, with_draft_vocab
from medusa_jax.training.stage import Stage, make_stage
from medusa_jax.whole_files import Json, replacing


class TrainState(NamedTuple):
    """The state that a step updates. `updates` counts the steps that were not skipped."""

    step: jax.Array
    updates: jax.Array
    params: PyTree
    opt: PyTree


def train(cfg: Config) -> Json:
    """Start or resume the training run `cfg`.

    Returns: the last metrics, and "stopped", the number of the signal (SIGTERM, SIGINT) that ended it
      before its last step.

    Raises:
      UserError: a problem with the configuration, the data or the machine; `cfg.workdir` holds a model, or
        another process trains in it.
    """
    refuse_model(cfg.workdir, "--workdir")
    with hosts.locked(cfg.workdir):
        run = Run(cfg)
        with run.checkpoints:
            return run.loop()


class Run:
    """A run: models, text, stage and compiled step; then the loop, evaluation, checkpoints and export."""

    def __init__(self, cfg: Config):
        """Load and compile everything, and restore the newest checkpoint if the workdir has one."""
        checks.check(cfg)
        for name in filter(None, [*sources.names(cfg.data.source), cfg.data.eval_source]):
            sources.check_exists(name)  # before the model is read
        groups = trained_groups(cfg.train, cfg.lora)
        self.mesh = mesh = make_mesh(cfg.mesh)
        setup = load_setup(cfg.model, cfg.heads, cfg.train, groups, mesh)
        self.cfg = cfg = checks.settle(cfg, setup.arch, mesh)
        self.bad_in_row = self.bad = 0

        # Text, and the tokens that heads score.
        size = setup.arch.vocab_size
        source = (cfg.data, cfg.model, cfg.workdir, size)
        texts, held_out = sources.texts(*source), sources.held_out_texts(*source)
        rows, evaluated = mix(texts), mix(held_out) if held_out else None
        self.checkpoints = Checkpoints(cfg.workdir, cfg.train.keep_checkpoints)
        resumed = self.checkpoints.latest is not None
        changed = resume.changes(cfg) if resumed else {}
        if "heads" in groups and cfg.heads.draft_vocab:
            counts = cfg.data.draft_vocab_from
            choose = partial(draft_vocab, cfg.heads, size, rows, cfg.workdir, counts)
            setup = with_draft_vocab(setup, mesh, choose)
        self.setup = setup

        micro = cfg.train.batch_size // cfg.train.accumulation
        epochs = cfg.train.epochs * rows.rows // cfg.train.batch_size
        self.steps = cfg.train.steps or max(epochs, 1)
        stage = make_stage(cfg.train, setup.arch, cfg.heads, cfg.lora, self.steps, mesh)
        if cfg.data.cache_features:  # seam: the flag asks for them
            features = importlib.import_module("medusa_jax.training.data.features")
            made_by = [cfg.train.dtype, dataclasses.asdict(cfg.model), setup.fingerprint]
            given = (made_by, stage, setup.frozen, mesh)
            cache = features.Cache(cfg.data, cfg.workdir, *given)
            rows = mix([cache.rows(text, micro) for text in texts])
            limit = cfg.data.eval_samples
            if held_out:
                evaluated = mix([cache.rows(text, micro, limit) for text in held_out])
        self.rows, self.content = rows, resume.contents(cfg.train.batch_size, rows, setup)

        # The state, fresh or restored; then the compiled step and the evaluation.
        optimizer = make_optimizer(cfg.optim, groups, self.steps)
        self.best, self.figures = float("inf"), dict[str, Json]()
        begin = partial(init_state, stage, optimizer, mesh, seed=cfg.train.seed)
        if resumed:
            shapes = placed_shapes(
                mesh, jax.eval_shape(begin, setup.frozen, start=setup.start)
            )
            # The initial weights are freed first: devices may not hold them and the state.
            self.setup = setup = setup._replace(start={})
            self.state = self.restore(shapes, changed)
        else:
            with announced("initialising"):
                self.state = begin(setup.frozen, start=setup.start)
        resume.record(cfg)
        schedule = make_schedule(cfg.optim, self.steps)
        step = make_step(stage, optimizer, schedule, cfg.train.seed, mesh)
        batch = batch_shapes(mesh, rows.row(0), micro, cfg.train.accumulation)
        self.step_fn = compile_step(step, self.state, setup.frozen, batch, mesh)
        self.evaluator: Evaluator | None = None
        if evaluated:
            total = min(cfg.data.eval_samples, evaluated.rows)
            self.evaluator = Evaluator(stage, mesh, evaluated, micro, total)

    def restore(self, state: TrainState, changed: dict[str, str]) -> TrainState:
        """The newest checkpoint, placed like `state`; `changed` lists fields that differ from the last start."""
        workdir = self.cfg.workdir
        params, opt, data, meta = self.checkpoints.restore(state.params, state.opt)
        resume.check(data, self.content, self.steps, workdir)
        if not changed.keys() & set(resume.SCORED):
            self.best = meta["best"]
        inform(f"resuming from step {meta['step']} of {self.steps} in {workdir}")
        for name, change in changed.items():
            inform(f"changed since it was started: {name}: {change}")
        counters = (np.int32(meta["step"]), np.int32(meta["updates"]))
        step, updates = jax.device_put(counters, replicated(self.mesh))
        return TrainState(step, updates, params, opt)

    def loop(self) -> Json:
        """Dispatch step n, then read the metrics of step n - 1, so the device never waits for the host."""
        train, state, frozen = self.cfg.train, self.state, self.setup.frozen
        del self.state  # donated by the first step
        start = int(np.asarray(state.step))
        tokens = train.batch_size * self.cfg.data.seq_len
        self.log = RunLog(self.cfg.workdir, start, self.steps, tokens)
        if hosts.first():
            self.log.open()
        last: Json = {}
        pending = None
        with closing(self.log), resume.StopRequest() as stop_request:
            local = local_numbers(self.mesh, train.batch_size, train.accumulation)
            read_ahead = batches(self.rows, train.batch_size, start + 1, self.steps, local)
            for n, rows in enumerate(read_ahead, start + 1):
                batch = microbatches(self.mesh, rows, train.accumulation)
                state, metrics = self.step_fn(state, frozen, batch)
                last = self.record_step(pending) or last
                pending = (n, metrics)
                self.checkpoints.check()
                end = n == self.steps
                stop = stop_request.after(n)
                evaluate = self.evaluator and (n % train.eval_every == 0 or end)
                save = n % train.save_every == 0 or end or stop
                if evaluate or save:
                    last, pending = self.record_step(pending) or last, None
                    with self.log.paused():
                        if evaluate:
                            self.evaluate(n, state)
                        if save:
                            self.save(n, state)
                if stop and not end:
                    self.checkpoints.wait()
                    return last | {"stopped": stop_request.report(n)}
            if self.evaluator and start == self.steps:  # a run that was finished before
                self.figures = {"held_out": self.evaluator(state.params, frozen)}
            where = self.export("export", self.steps, state)
            self.checkpoints.wait()
            if hosts.first():
                inform(f"done: {self.steps} steps; the result is in {where}")
            return last

    def record_step(self, pending: tuple[int, PyTree] | None) -> Json | None:
        """Record the metrics of a finished step; raises after too many bad steps in a row."""
        if pending is None:
            return None
        n, metrics = pending
        hosts.wait(metrics)
        skipped = bool(np.asarray(metrics["skipped"]))
        self.bad_in_row = self.bad_in_row + 1 if skipped else 0
        self.bad += skipped
        if skipped:
            inform(f"step {n}: loss or gradient is not finite, skipped ({self.bad} in all)")
        record = hosts.numbers(metrics) | {"bad_steps": self.bad}
        if n % self.cfg.train.log_every == 0 or n in (1, self.steps):
            self.log.train(n, record)
        if self.bad_in_row >= self.cfg.train.max_bad_steps:
            raise UserError(
                f"{self.bad_in_row} steps in a row had a loss or gradient that is not finite, the "
                f"last one step {n}: lower optim.lr or look at the data"
            )
        return record

    def evaluate(self, n: int, state: TrainState) -> None:
        """Log held-out metrics; export the best model so far."""
        assert self.evaluator is not None
        record = self.evaluator(state.params, self.setup.frozen)
        self.log.evaluation(n, record)
        train = self.cfg.train
        weights = [train.lambda_decay**k for k in range(len(record["loss"]))]
        score = float(np.dot(weights, record["loss"]))
        self.figures = {"held_out": record}
        if "lm_loss" in record:
            score = record["lm_objective"] + train.lambda_0 * train.lambda_decay * score
        if score < self.best:
            self.best = score
            self.export("best", n, state)

    def save(self, n: int, state: TrainState) -> None:
        """Start to write the checkpoint of step n."""
        meta = {"step": n, "updates": int(np.asarray(state.updates)), "best": self.best}
        data = {"step": n} | self.content
        with announced("saving a checkpoint"):
            self.checkpoints.save(n, state.params, state.opt, data, meta)

    def export(self, name: str, n: int, state: TrainState) -> str:
        """Write the result of step n, with its recipe, to `<workdir>/<name>/`; returns that path.

        A new directory appears complete; in one that exists each file is replaced by itself.
        """
        cfg, setup, directory = self.cfg, self.setup, os.path.join(self.cfg.workdir, name)
        recipe = {"step": n, "steps": self.steps, "config": dataclasses.asdict(cfg)}
        if setup.heads_recipe is not None:
            recipe["start"] = setup.heads_recipe
        recipe |= self.figures
        with replacing(directory) if hosts.first() else nullcontext(directory) as new:
            export(new, cfg.model, cfg.heads, cfg.lora, setup, state.params, recipe)
        return directory


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
            batch = batch | {"anchors": losses.draw_anchors(step_key, batch, stage.anchors)}
        counts_K = losses.pair_counts(batch, stage.offsets)
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


class Evaluator:
    """Mean loss and accuracies on the first `total` rows of held-out text, `size` at a time.

    With heads also the expected tokens per decoding step (`estimate.py`).
    """

    def __init__(self, stage: Stage, mesh: Mesh, rows: Rows, size: int, total: int):
        self.stage, self.mesh, self.rows = stage, mesh, rows
        self.size, self.total = size, total

        @jax.jit
        def sums(params: PyTree, frozen: PyTree, batch: PyTree) -> PyTree:
            counts = losses.pair_counts(batch, stage.offsets)
            _, out = stage.loss(params, frozen, losses.StepInputs(batch, counts))
            return out, counts

        self.sums = sums
        self.ranks = stage.ranks and jax.jit(stage.ranks)

    def __call__(self, params: PyTree, frozen: PyTree) -> Json:
        local = local_rows(self.mesh, self.size)
        total: PyTree = None
        ranks = []
        for first in range(0, self.total, self.size):
            numbers = first + local
            batch = read(self.rows, numbers)
            # Rows beyond the last sample become padding.
            batch["segment_ids"][numbers >= self.total] = 0
            placed = jax.tree.map(lambda x: x[0], microbatches(self.mesh, batch, 1))
            rank = self.ranks if first < estimate.ROWS else None
            with jax.set_mesh(self.mesh):  # attention is split over it
                out = self.sums(params, frozen, placed)
                ranked = rank(params, frozen, placed) if rank else None
            total = out if total is None else jax.tree.map(jnp.add, total, out)
            if ranked is not None:
                ranks.append(hosts.on_host(ranked))
        record = hosts.numbers(self.stage.metrics(*total))
        return record | (estimate.accepted_lengths(np.concatenate(ranks)) if ranks else {})
