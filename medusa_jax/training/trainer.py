"""Training, from a configuration to exported heads: read it from top to bottom.

`train_plan` makes a `Run` (models, texts, stage, state), whose `loop` dispatches steps (`step.make_step`), evaluates,
saves and exports.
"""

import os
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path

import jax
import numpy as np

from medusa_jax import hosts
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.files.not_replaced import refuse_model
from medusa_jax.sharding import PyTree, replicated
from medusa_jax.training import resume
from medusa_jax.training.checkpoint import Checkpoints
from medusa_jax.training.data.rows import batches
from medusa_jax.training.export import export
from medusa_jax.training.placement import local_numbers, microbatches, placed_shapes
from medusa_jax.training.plan import RunPlan
from medusa_jax.training.prepare import compiled, evaluator_of, load, prepare
from medusa_jax.training.run_log import LOG, RunLog, read_log
from medusa_jax.training.step import TrainState, init_state
from medusa_jax.whole_files import Json, replacing


def train_plan(plan: RunPlan) -> Json:
    """Start or resume a run.

    Returns: the last metrics.

    Raises:
      Terminated, KeyboardInterrupt: a signal ended it after a step, whose checkpoint is saved.
      UserError: a problem with the data or the machine; the workdir holds files of others, or another process trains in it.
    """
    refuse_foreign(plan.workdir)
    with (
        hosts.locked(plan.workdir),
        Checkpoints(plan.workdir, plan.train.keep_checkpoints) as checkpoints,
    ):
        return Run(plan, checkpoints).loop()


def refuse_foreign(workdir: str) -> None:
    """Refuse a workdir with files that no run has written and this one would replace.

    Raises:
      UserError: names one of them.
    """
    refuse_model(workdir, "--workdir")
    read_log(Path(workdir) / LOG)
    if not any(
        os.path.exists(os.path.join(workdir, n)) for n in (resume.FILE, "checkpoints")
    ):
        for name in ("best", "export"):
            refuse_model(os.path.join(workdir, name), "--workdir: its")


class Run:
    """A run: its state and compiled step; then the loop, evaluation, checkpoints and export.

    Attributes:
      setup: the models that it started from; without trained weights, which only the state holds.
      content: describes text and frozen weights in checkpoints.
      best: the lowest held-out score so far.
      figures: of the last evaluation, for recipes.
      bad, bad_in_row: steps that were skipped, in all and since the last good one.
    """

    def __init__(self, plan: RunPlan, checkpoints: Checkpoints):
        """Load and compile everything, and restore the newest checkpoint if there is one."""
        self.plan, self.checkpoints, self.mesh = plan, checkpoints, plan.mesh
        self.bad_in_row = self.bad = 0
        self.best, self.figures = float("inf"), dict[str, Json]()
        is_resumed = checkpoints.latest is not None
        changed = resume.changes(plan.workdir, plan.record) if is_resumed else {}

        setup, texts = load(plan, is_resumed)
        job = prepare(plan, setup, texts)
        self.setup = setup._replace(start={})
        frozen, start = setup.frozen, setup.start
        self.steps, self.rows = job.steps, job.rows
        self.content = resume.contents(
            plan.train.batch_size, job.rows, self.setup.fingerprint, self.setup.draft_ids
        )
        begin = partial(
            init_state, job.stage, job.optimizer, self.mesh, seed=plan.train.seed
        )
        if is_resumed:
            shapes = placed_shapes(self.mesh, jax.eval_shape(begin, frozen, start=start))
            # The initial weights are freed first: devices may not hold them and the state.
            del setup, start
            self.state = self.restore(shapes, changed)
        else:
            with announced("initialising"):
                self.state = begin(frozen, start=start)
        resume.record(plan.workdir, plan.record)
        self.step_fn = compiled(plan, job, self.state, frozen)
        self.evaluator = evaluator_of(plan, job)
        tokens = plan.train.batch_size * plan.data.seq_len
        at = int(np.asarray(self.state.step))
        self.log = RunLog(plan.workdir, at, self.steps, tokens)

    def restore(self, shapes: TrainState, changed: dict[str, str]) -> TrainState:
        """The newest checkpoint, placed like `shapes`; `changed` lists fields that differ from the last start."""
        workdir = self.plan.workdir
        params, opt, data, meta = self.checkpoints.restore(shapes.params, shapes.opt)
        resume.check(data, self.content, self.steps, workdir)
        if meta["scored"] == resume.scored(self.plan.record):
            self.best = meta["best"]
        self.bad = meta["step"] - meta["updates"]
        self.bad_in_row = meta["bad_in_row"]
        self.setup = self.setup._replace(heads_recipe=meta["start"])
        inform(f"resuming from step {meta['step']} of {self.steps} in {workdir}")
        for name, change in changed.items():
            note = ", without effect on a resumed run" if name in resume.INITIAL else ""
            inform(f"changed since it was started: {name}: {change}{note}")
        counters = (np.int32(meta["step"]), np.int32(meta["updates"]))
        step, updates = jax.device_put(counters, replicated(self.mesh))
        return TrainState(step, updates, params, opt)

    def loop(self) -> Json:
        """Dispatch step n, then read the metrics of step n - 1, so the device never waits for the host."""
        train, frozen, start = self.plan.train, self.setup.frozen, self.log.start
        if hosts.first():
            self.log.open()
        last: Json = {}
        pending = None
        with closing(self.log), resume.StopRequest() as stop_request:
            local = local_numbers(self.mesh, train.batch_size, train.accumulation)
            read_ahead = batches(self.rows, train.batch_size, start + 1, self.steps, local)
            for n, rows in enumerate(read_ahead, start + 1):
                batch = microbatches(self.mesh, rows, train.accumulation)
                self.state, metrics = self.step_fn(self.state, frozen, batch)
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
                            self.evaluate(n)
                        if save:
                            self.save(n)
                if stop and not end:
                    self.checkpoints.wait()
                    raise stop_request.error(n)
            if self.evaluator and start == self.steps:  # a run that was finished before
                self.figures = {"held_out": self.evaluator(self.state.params, frozen)}
            directory = self.export("export", self.steps)
            self.checkpoints.wait()
            losses = jax.tree.leaves(self.figures) or [np.nan if self.bad_in_row else 0.0]
            word = "done" if np.isfinite(losses).all() else "diverged (lower optim.lr)"
            if hosts.first():
                inform(f"{word}: {self.steps} steps; the result is in {directory}")
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
        if n % self.plan.train.log_every == 0 or n in (1, self.steps):
            self.log.train(n, record)
        if self.bad_in_row >= self.plan.train.max_bad_steps:
            raise UserError(
                f"{self.bad_in_row} steps in a row had a loss or gradient that is not finite, the "
                f"last one step {n}: lower optim.lr or look at the data"
            )
        return record

    def evaluate(self, n: int) -> None:
        """Log held-out metrics; export the best model so far."""
        assert self.evaluator is not None
        record = self.evaluator(self.state.params, self.setup.frozen)
        self.log.evaluation(n, record)
        train = self.plan.train
        weights = [train.lambda_decay**k for k in range(len(record["loss"]))]
        score = float(np.dot(weights, record["loss"]))
        self.figures = {"held_out": record}
        if "lm_loss" in record:
            score = record["lm_objective"] + train.lambda_0 * train.lambda_decay * score
        if score < self.best:
            self.best = score
            self.export("best", n)

    def save(self, n: int) -> None:
        """Start to write the checkpoint of step n."""
        state = self.state
        scored, updates = resume.scored(self.plan.record), int(np.asarray(state.updates))
        meta = {"step": n, "updates": updates, "best": self.best, "scored": scored}
        meta |= {"start": self.setup.heads_recipe, "bad_in_row": self.bad_in_row}
        data = {"step": n} | self.content
        with announced("saving a checkpoint"):
            self.checkpoints.save(n, state.params, state.opt, data, meta)

    def export(self, name: str, n: int) -> str:
        """Write the result of step n, with its recipe, to `<workdir>/<name>/`; returns that path.

        A new directory appears complete; in an existing one files are replaced one by one.
        """
        plan, setup = self.plan, self.setup
        directory = os.path.join(plan.workdir, name)
        recipe = {"step": n, "steps": self.steps, "config": plan.record}
        if setup.heads_recipe is not None:
            recipe["start"] = setup.heads_recipe
        recipe |= self.figures
        with replacing(directory) if hosts.first() else nullcontext(directory) as new:
            export(new, plan, setup, self.state.params, recipe)
        return directory
