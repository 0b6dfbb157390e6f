"""Training, from a configuration to exported heads: read it from top to bottom.

`train` resolves a `RunPlan` and makes a `Run` (models, texts, stage, state), whose `loop` dispatches steps
(`step.make_step`), evaluates, saves and exports.
"""

import os
from contextlib import closing, nullcontext
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from medusa_jax import hosts
from medusa_jax.config import Config
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.files.hub import refuse_model
from medusa_jax.heads import vocabulary
from medusa_jax.sharding import PyTree, replicated
from medusa_jax.training import resume
from medusa_jax.training.checkpoint import Checkpoints
from medusa_jax.training.data.features import Cache
from medusa_jax.training.data.rows import Rows, batches, mix
from medusa_jax.training.data.texts import Texts, read_texts
from medusa_jax.training.draft_tokens import draft_vocab, with_draft_vocab
from medusa_jax.training.evaluation import Evaluator
from medusa_jax.training.export import export
from medusa_jax.training.optim.optimizer import make_optimizer, make_schedule
from medusa_jax.training.placement import (
    batch_shapes,
    compile_step,
    local_numbers,
    microbatches,
    placed_shapes,
)
from medusa_jax.training.plan import RunPlan
from medusa_jax.training.run_log import RunLog
from medusa_jax.training.setup import Setup, load_setup
from medusa_jax.training.stage import Stage, make_stage
from medusa_jax.training.step import TrainState, init_state, make_step
from medusa_jax.whole_files import Json, replacing


def train(cfg: Config) -> Json:
    """Start or resume the training run `cfg`; as `train_plan`."""
    plan = RunPlan(cfg)
    return train_plan(plan)


def train_plan(plan: RunPlan) -> Json:
    """Start or resume a run.

    Returns: the last metrics, and "stopped", the number of the signal (SIGTERM, SIGINT) that ended it
      before its last step.

    Raises:
      UserError: a problem with the data or the machine; the workdir holds a model, or another process trains in it.
    """
    refuse_model(plan.workdir, "--workdir")
    with (
        hosts.locked(plan.workdir),
        Checkpoints(plan.workdir, plan.train.keep_checkpoints) as checkpoints,
    ):
        return Run(plan, checkpoints).loop()


class Inputs(NamedTuple):
    """Models and texts of a run."""

    setup: Setup
    texts: Texts


def load(plan: RunPlan) -> Inputs:
    """Read the models and the texts, and choose the tokens that heads score."""
    setup, data = load_setup(plan), plan.data
    vocab_size = plan.arch.vocab_size
    texts = read_texts(data, plan.model.tokenizer_path, plan.workdir, vocab_size)
    if plan.drafter and plan.drafter.heads.draft_vocab:
        choose = partial(
            draft_vocab,
            plan.drafter.heads,
            vocab_size,
            mix(texts.train),
            plan.workdir,
            data.draft_vocab_from,
        )
        setup = with_draft_vocab(setup, plan.mesh, choose)
    return Inputs(setup, texts)


class StageRows(NamedTuple):
    """The rows that a stage reads; `held_out` is None if nothing is evaluated."""

    train: Rows
    held_out: Rows | None


def rows_of(plan: RunPlan, stage: Stage, inputs: Inputs) -> StageRows:
    """The rows of all texts, with hidden states if `data.cache_features` is set."""
    texts, data, size = inputs.texts, plan.data, plan.microbatch
    train: list[Rows] = [*texts.train]
    held_out: list[Rows] = [*texts.held_out]
    if data.cache_features:
        setup = inputs.setup
        made_by = [plan.train.dtype, plan.record["model"], setup.fingerprint]
        cache = Cache(data, plan.workdir, made_by, stage, setup.frozen, plan.mesh)
        train = [cache.rows(text, size) for text in texts.train]
        held_out = [cache.rows(text, size, data.eval_samples) for text in texts.held_out]
    return StageRows(mix(train), mix(held_out) if held_out else None)


class Run:
    """A run: its state and compiled step; then the loop, evaluation, checkpoints and export.

    Attributes:
      setup: the models that it started from; initial weights that are trained are in the state alone.
      content: describes text and frozen weights in checkpoints.
      best: the lowest held-out score so far.
      figures: of the last evaluation, for recipes.
    """

    def __init__(self, plan: RunPlan, checkpoints: Checkpoints):
        """Load and compile everything, and restore the newest checkpoint if there is one."""
        self.plan, self.checkpoints, self.mesh = plan, checkpoints, plan.mesh
        train = plan.train
        resumed = checkpoints.latest is not None
        changed = resume.changes(plan.workdir, plan.record) if resumed else {}
        inputs = load(plan)
        self.steps = plan.steps(mix(inputs.texts.train).rows)
        stage = make_stage(
            train, plan.arch, plan.groups, plan.drafter, plan.lora, self.steps, self.mesh
        )
        rows = rows_of(plan, stage, inputs)
        self.rows = rows.train
        ids = inputs.setup.frozen.get(vocabulary.GROUP, {}).get("ids")
        self.content = resume.contents(
            train.batch_size, rows.train, inputs.setup.fingerprint, ids
        )
        self.bad_in_row = self.bad = 0
        self.best, self.figures = float("inf"), dict[str, Json]()

        # The state, fresh or restored; then the compiled step and the evaluation.
        optimizer = make_optimizer(plan.optim, plan.groups, self.steps)
        begin = partial(init_state, stage, optimizer, self.mesh, seed=train.seed)
        self.setup = inputs.setup._replace(start={})
        if resumed:
            shapes = placed_shapes(
                self.mesh,
                jax.eval_shape(begin, self.setup.frozen, start=inputs.setup.start),
            )
            # The initial weights are freed first: devices may not hold them and the state.
            del inputs
            self.state = self.restore(shapes, changed)
        else:
            with announced("initialising"):
                self.state = begin(self.setup.frozen, start=inputs.setup.start)
        resume.record(plan.workdir, plan.record)
        schedule = make_schedule(plan.optim, self.steps)
        step = make_step(stage, optimizer, schedule, train.seed, self.mesh)
        batch = batch_shapes(
            self.mesh, rows.train.row(0), plan.microbatch, train.accumulation
        )
        self.step_fn = compile_step(step, self.state, self.setup.frozen, batch, self.mesh)
        self.evaluator: Evaluator | None = None
        if rows.held_out:
            total = min(plan.data.eval_samples, rows.held_out.rows)
            self.evaluator = Evaluator(
                stage, self.mesh, rows.held_out, plan.microbatch, total, train.loss_chunk
            )
        start = int(np.asarray(self.state.step))
        tokens = train.batch_size * plan.data.seq_len
        self.log = RunLog(plan.workdir, start, self.steps, tokens)

    def restore(self, shapes: TrainState, changed: dict[str, str]) -> TrainState:
        """The newest checkpoint, placed like `shapes`; `changed` lists fields that differ from the last start."""
        workdir = self.plan.workdir
        params, opt, data, meta = self.checkpoints.restore(shapes.params, shapes.opt)
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
                    return last | {"stopped": stop_request.report(n)}
            if self.evaluator and start == self.steps:  # a run that was finished before
                self.figures = {"held_out": self.evaluator(self.state.params, frozen)}
            directory = self.export("export", self.steps)
            self.checkpoints.wait()
            if hosts.first():
                inform(f"done: {self.steps} steps; the result is in {directory}")
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
        meta = {"step": n, "updates": int(np.asarray(state.updates)), "best": self.best}
        data = {"step": n} | self.content
        with announced("saving a checkpoint"):
            self.checkpoints.save(n, state.params, state.opt, data, meta)

    def export(self, name: str, n: int) -> str:
        """Write the result of step n, with its recipe, to `<workdir>/<name>/`; returns that path.

        A new directory appears complete; in one that exists each file is replaced by itself.
        """
        plan, setup, directory = (
            self.plan,
            self.setup,
            os.path.join(self.plan.workdir, name),
        )
        recipe = {"step": n, "steps": self.steps, "config": plan.record}
        if setup.heads_recipe is not None:
            recipe["start"] = setup.heads_recipe
        recipe |= self.figures
        with replacing(directory) if hosts.first() else nullcontext(directory) as new:
            export(new, plan.model, plan.heads, plan.lora, setup, self.state.params, recipe)
        return directory
