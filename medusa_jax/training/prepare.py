"""Prepare a run: models, texts, the stage with its rows, the compiled step."""

import os
from typing import NamedTuple

import numpy as np
import optax
from jax.stages import Compiled

from medusa_jax import hosts
from medusa_jax.sharding import PyTree
from medusa_jax.training.data.features import Cache
from medusa_jax.training.data.rows import Rows, mix
from medusa_jax.training.data.texts import Texts, read_texts
from medusa_jax.training.draft_tokens import DRAFT_VOCAB, draft_vocab
from medusa_jax.training.evaluation import Evaluator
from medusa_jax.training.models import Setup, load_setup
from medusa_jax.training.optim.optimizer import make_optimizer, make_schedule
from medusa_jax.training.placement import batch_shapes, compile_step
from medusa_jax.training.plan import RunPlan
from medusa_jax.training.stage import Stage, make_stage
from medusa_jax.training.step import TrainState, make_step
from medusa_jax.whole_files import write_array


def load(plan: RunPlan, is_resumed: bool) -> tuple[Setup, Texts]:
    """Read the models and the texts, and choose the tokens that heads score."""
    setup, data = load_setup(plan, with_heads=not is_resumed), plan.data
    vocab_size = plan.arch.vocab_size
    texts = read_texts(data, plan.model.tokenizer_path, plan.workdir, vocab_size)
    if plan.drafter and plan.drafter.heads.draft_vocab:
        if setup.draft_ids is None:
            ids = draft_vocab(
                plan.drafter.heads, vocab_size, texts.train, plan.workdir,
                data.draft_vocab_from, is_resumed,
            )  # fmt: skip
            setup = setup.scoring(ids, plan.mesh)
        if hosts.first():
            ids_file = os.path.join(plan.workdir, DRAFT_VOCAB)
            write_array(ids_file, np.asarray(setup.draft_ids))
    return setup, texts


class Job(NamedTuple):
    """A stage and its rows.

    Attributes:
      steps: number of updates.
      held_out: rows for evaluation; None: nothing is evaluated.
    """

    steps: int
    stage: Stage
    optimizer: optax.GradientTransformation
    rows: Rows
    held_out: Rows | None


def prepare(plan: RunPlan, setup: Setup, texts: Texts) -> Job:
    """The stage and its rows, with hidden states if `data.cache_features` is set."""
    steps = plan.steps(mix(texts.train).rows)
    stage = make_stage(
        plan.train, plan.arch, plan.groups, plan.drafter, plan.lora, steps, plan.mesh
    )
    train: list[Rows] = [*texts.train]
    held_out: list[Rows] = [*texts.held_out]
    if plan.data.cache_features:
        made_by = [plan.train.dtype, plan.record["model"], setup.fingerprint]
        cache = Cache(plan.data, plan.workdir, made_by, stage, setup.frozen, plan.mesh)
        size, limit = plan.microbatch, plan.data.eval_samples
        train = [cache.rows(text, size) for text in texts.train]
        held_out = [cache.rows(text, size, limit) for text in texts.held_out]
    optimizer = make_optimizer(plan.optim, plan.groups, steps)
    return Job(steps, stage, optimizer, mix(train), mix(held_out) if held_out else None)


def compiled(plan: RunPlan, job: Job, state: TrainState, frozen: PyTree) -> Compiled:
    schedule = make_schedule(plan.optim, job.steps)
    step = make_step(job.stage, job.optimizer, schedule, plan.train.seed, plan.mesh)
    accumulation = plan.train.accumulation
    batch = batch_shapes(plan.mesh, job.rows.row(0), plan.microbatch, accumulation)
    return compile_step(step, state, frozen, batch, plan.mesh)


def evaluator_of(plan: RunPlan, job: Job) -> Evaluator | None:
    """The evaluation, if there is held-out text."""
    if job.held_out is None:
        return None
    total = min(plan.data.eval_samples, job.held_out.rows)
    chunk = plan.train.loss_chunk
    return Evaluator(job.stage, plan.mesh, job.held_out, plan.microbatch, total, chunk)
