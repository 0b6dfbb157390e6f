"""The training loop: data, steps, evaluation, checkpoints, export."""

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from medusa_jax import hosts
from medusa_jax.config import Config
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.interop.hub import refuse_model
from medusa_jax.sharding import PyTree, local_rows, make_mesh, replicated
from medusa_jax.training import checks, estimate, export, losses, resume
from medusa_jax.training.checkpoint import Checkpoints
from medusa_jax.training.data import features, prepare
from medusa_jax.training.data.pipeline import batches, read
from medusa_jax.training.data.rows import Rows, mixed
from medusa_jax.training.data.vocabulary import draft_vocab
from medusa_jax.training.log.run_log import RunLog
from medusa_jax.training.optim.optimizer import make_optimizer, make_schedule
from medusa_jax.training.partition import trained_groups
from medusa_jax.training.setup import Setup, load_setup, with_draft_vocab
from medusa_jax.training.stage import Stage, make_stage
from medusa_jax.training.step import (
    TrainState,
    abstract_batch,
    compile_step,
    init_state,
    local_numbers,
    make_step,
    microbatches,
    summary,
)
from medusa_jax.whole_files import Json, write_json

# Signals that end a run after the current step, and their names for messages.
STOPS: dict[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class Evaluator:
    """Mean loss and accuracies on the first `eval_samples` rows of held-out text.

    With heads also the expected tokens per decoding step (`estimate.py`).
    """

    def __init__(self, cfg: Config, stage: Stage, mesh: Mesh, rows: Rows):
        self.rows, self.mesh = rows, mesh
        self.size = cfg.train.batch_size // cfg.train.accumulation
        self.total = min(cfg.data.eval_samples, rows.rows)

        @jax.jit
        def sums(params: PyTree, frozen: PyTree, batch: PyTree) -> PyTree:
            batch = jax.tree.map(lambda x: x[0], batch)
            counts = losses.pair_counts(batch, stage.offsets)
            _, out = stage.loss(params, frozen, losses.StepInputs(batch, counts))
            return out, counts

        @jax.jit
        def ranks(params: PyTree, frozen: PyTree, batch: PyTree) -> jax.Array:
            assert stage.ranks is not None
            return stage.ranks(params, frozen, jax.tree.map(lambda x: x[0], batch))

        self.stage, self.sums, self.ranks = stage, sums, ranks

    def __call__(self, params: PyTree, frozen: PyTree) -> Json:
        local = local_rows(self.mesh, self.size)
        total: PyTree = None
        ranks = []
        for first in range(0, self.total, self.size):
            numbers = first + local
            batch = read(self.rows, numbers)
            # Rows beyond the last sample become padding.
            batch["segment_ids"][numbers >= self.total] = 0
            placed = microbatches(self.mesh, batch, 1)
            out = self.sums(params, frozen, placed)
            total = out if total is None else jax.tree.map(jnp.add, total, out)
            if self.stage.ranks is not None and first < estimate.ROWS:
                ranks.append(hosts.on_host(self.ranks(params, frozen, placed)))
        record = to_host(summary(self.stage, *total))
        return record | (estimate.accepted_lengths(np.concatenate(ranks)) if ranks else {})


def to_host(metrics: PyTree) -> Json:
    """Numbers, and lists of numbers for arrays."""
    return {name: hosts.on_host(x).tolist() for name, x in metrics.items()}


def total_steps(cfg: Config, rows: int) -> int:
    """Updates in the run: `train.steps`, else `train.epochs` over `rows` rows."""
    return cfg.train.steps or max(cfg.train.epochs * rows // cfg.train.batch_size, 1)


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
        return _train(cfg)


def _train(cfg: Config) -> Json:
    mesh = make_mesh(cfg.mesh)
    setup = load_setup(cfg, mesh)
    cfg.model.arch = setup.arch
    checks.fit_accumulation(cfg, mesh)
    prepare.choose_features(cfg)
    checks.check(cfg, mesh)
    texts, held_out_text = prepare.texts(cfg), prepare.held_out_text(cfg)
    rows: Rows = mixed(texts)
    held_out: Rows | None = held_out_text
    checkpoints = Checkpoints(cfg.workdir, cfg.train.keep_checkpoints)
    changed = {} if checkpoints.latest is None else resume.changes(cfg)
    if "heads" in trained_groups(cfg) and cfg.heads.draft_vocab:
        setup = with_draft_vocab(setup, mesh, partial(draft_vocab, cfg, rows))

    steps = total_steps(cfg, rows.rows)
    stage = make_stage(cfg, steps, mesh)
    if cfg.data.cache_features:
        assert stage.hidden is not None and setup.base is not None
        read = (stage.hidden, setup.frozen, setup.base["fingerprint"])
        rows = mixed([features.cached(cfg, mesh, text, *read) for text in texts])
        if held_out_text:
            limit = cfg.data.eval_samples
            held_out = features.cached(cfg, mesh, held_out_text, *read, limit)
    schedule = make_schedule(cfg.optim, steps)
    optimizer = make_optimizer(cfg.optim, trained_groups(cfg), steps)
    with announced("initialising"):
        state = init_state(
            stage, optimizer, mesh, setup.frozen, cfg.train.seed, setup.start
        )
    best = float("inf")
    if checkpoints.latest is not None:
        params, opt, data, meta = checkpoints.restore(state.params, state.opt)
        resume.check(data, resume.contents(cfg, rows, setup), cfg.workdir)
        if meta["step"] > steps:
            raise UserError(
                f"the checkpoint in {cfg.workdir} is at step {meta['step']}, beyond the "
                f"{steps} of this run: set train.steps to {meta['step']} to export it "
                "unchanged, or higher to continue"
            )
        counters = (np.int32(meta["step"]), np.int32(meta["updates"]))
        step, updates = jax.device_put(counters, replicated(mesh))
        state = TrainState(step, updates, params, opt)
        best = best if changed.keys() & set(resume.SCORED) else meta["best"]
        inform(f"resuming from step {meta['step']} of {steps} in {cfg.workdir}")
        for name, change in changed.items():
            inform(f"changed since it was started: {name}: {change}")
    if hosts.first():
        write_json(os.path.join(cfg.workdir, resume.FILE), dataclasses.asdict(cfg))
    run = Run(cfg, mesh, stage, setup, rows, checkpoints, steps, best)
    step_fn = make_step(stage, optimizer, schedule, cfg.train.seed, mesh)
    compiled = compile_step(step_fn, state, setup.frozen, abstract_batch(cfg, mesh), mesh)
    evaluator = Evaluator(cfg, stage, mesh, held_out) if held_out else None
    with checkpoints:
        return run.loop(compiled, state, evaluator)


class Run:
    """A run in progress: the loop, checkpoints and export."""

    def __init__(
        self, cfg: Config, mesh: Mesh, stage: Stage, setup: Setup, rows: Rows,
        checkpoints: Checkpoints, steps: int, best: float,
    ):  # fmt: skip
        self.cfg, self.mesh, self.stage = cfg, mesh, stage
        self.setup, self.rows = setup, rows
        self.checkpoints, self.steps, self.best = checkpoints, steps, best
        self.bad_in_row = self.bad = 0
        self.stop = 0

    def request_stop(self, number: int, _: FrameType | None) -> None:
        """Signal handler: stop after this step and save; a second Ctrl-C stops at once."""
        self.stop = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with suppress(RuntimeError):  # interrupted another print
                inform("finishing this step, then saving; Ctrl-C again stops at once")

    def loop(
        self, step_fn: Callable, state: TrainState, evaluator: Evaluator | None
    ) -> dict:
        """Dispatch step n, then read the metrics of step n - 1, so the device never waits for the host."""
        train = self.cfg.train
        start = int(np.asarray(state.step))
        tokens = train.batch_size * self.cfg.data.seq_len
        self.progress = RunLog(
            self.cfg.workdir, start, self.steps, tokens, hosts.first(), train.curves, train.wandb,
            dataclasses.asdict(self.cfg),
        )  # fmt: skip
        # Python allows handlers in the main thread only; with several processes JAX has its own.
        handles = jax.process_count() == 1
        handles &= threading.current_thread() is threading.main_thread()
        if handles:
            previous = {n: signal.signal(n, self.request_stop) for n in STOPS}
        last: Json = {}
        try:
            pending = None
            local = local_numbers(self.mesh, train.batch_size, train.accumulation)
            read_ahead = batches(self.rows, train.batch_size, start + 1, self.steps, local)
            for n, rows in enumerate(read_ahead, start + 1):
                batch = microbatches(self.mesh, rows, train.accumulation)
                state, metrics = step_fn(state, self.setup.frozen, batch)
                last = self.record_step(pending) or last
                pending = (n, metrics)
                self.checkpoints.check()
                end = n == self.steps
                stop = self.stop or hosts.asked_to_stop(n)
                evaluate = evaluator is not None and (n % train.eval_every == 0 or end)
                save = n % train.save_every == 0 or end or stop
                if evaluate or save:
                    last, pending = self.record_step(pending) or last, None
                    with self.progress.paused():
                        if evaluate:
                            assert evaluator is not None
                            record = evaluator(state.params, self.setup.frozen)
                            self.evaluate(n, record, state)
                        if save:
                            self.save(n, state)
                if stop and not end:
                    self.checkpoints.wait()
                    number = self.stop or signal.SIGTERM  # JAX does not say which
                    inform(
                        f"stopped by {STOPS[number]} after step {n}; a checkpoint is saved, the "
                        "same command resumes from there"
                    )
                    return last | {"stopped": number}
            export.result(
                self.cfg, self.setup, state.params, "export", self.recipe(self.steps)
            )
            self.checkpoints.wait()
            if hosts.first():
                where = os.path.join(self.cfg.workdir, "export")
                inform(f"done: {self.steps} steps; the result is in {where}")
            return last
        finally:
            if handles:
                for number, handler in previous.items():
                    signal.signal(number, handler)
            self.progress.close()

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
            inform(
                f"step {n}: loss or gradient is not finite, update skipped ({self.bad} in all)"
            )
        due = n % self.cfg.train.log_every == 0 or n in (1, self.steps)
        record = to_host(metrics) | {"bad_steps": self.bad}
        if due:
            self.progress.train(n, record)
        if self.bad_in_row >= self.cfg.train.max_bad_steps:
            at = self.checkpoints.latest
            where = (
                "there is no checkpoint yet" if at is None else f"checkpoint {at} is good"
            )
            raise UserError(
                f"{self.bad_in_row} steps in a row had a loss or gradient that is not finite, "
                f"the last one step {n}; {where}; lower optim.lr or look at the data"
            )
        return record

    def evaluate(self, n: int, record: Json, state: TrainState) -> None:
        """Log held-out metrics; export the best model so far."""
        self.progress.evaluation(n, record)
        weights = [self.cfg.train.lambda_decay**k for k in range(len(record["loss"]))]
        score = float(np.dot(weights, record["loss"]))
        if "lm_loss" in record:
            factor = self.cfg.train.lambda_0 * self.cfg.train.lambda_decay
            score = record["lm_objective"] + factor * score
        if score < self.best:
            self.best = score
            recipe = self.recipe(n) | {"held_out": record}
            export.result(self.cfg, self.setup, state.params, "best", recipe)

    def save(self, n: int, state: TrainState) -> None:
        meta = {"step": n, "updates": int(np.asarray(state.updates)), "best": self.best}
        data = {"step": n} | resume.contents(self.cfg, self.rows, self.setup)
        with announced("saving a checkpoint"):
            self.checkpoints.save(n, state.params, state.opt, data, meta)

    def recipe(self, n: int) -> Json:
        """The recipe of the result of step n; "start" is the recipe of the initial heads."""
        recipe = {"step": n, "steps": self.steps, "config": dataclasses.asdict(self.cfg)}
        start = self.setup.heads_recipe
        return recipe if start is None else recipe | {"start": start}
