"""Training steps: tiny ones of every stage, against a CPU's losses; heads of a 7B model.

The step is the one that training runs, on random weights and random tokens, all of which are targets.
"""

import os
import statistics
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.stages import Compiled

from medusa_jax.commands import train as cli
from medusa_jax.config import Config, LlamaConfig
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.sharding import PyTree
from medusa_jax.training import dry
from medusa_jax.training.models import load_setup
from medusa_jax.training.optim.optimizer import make_optimizer, make_schedule
from medusa_jax.training.placement import batch_shapes, compile_step, microbatches
from medusa_jax.training.plan import RunPlan
from medusa_jax.training.stage import make_stage
from medusa_jax.training.step import TrainState, init_state, make_step
from research.hardware.record import Record

# One recipe of every loss; Medusa-2 with LoRA.
STAGES = ("demo_backbone", "demo_medusa", "demo_hydrapp", "demo_amphista", "demo_eagle", "demo_eagle3",
          "smollm2_m2")  # fmt: skip
STEPS = 3
TINY = LlamaConfig(vocab_size=512, d_model=256, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64,
                   d_ff=512, max_position=2048)  # fmt: skip
# (recipe, rows of 2,048 tokens)
LARGE = (("vicuna7b_m1", 8), ("vicuna7b_eagle3", 4))


def stages(record: Record) -> None:
    """Losses of three steps; `summary` compares those of this device with a CPU's."""
    kinds = ("float32",) if record.small else ("float32", "bfloat16")
    for name in STAGES[1:2] if record.small else STAGES:
        for kind in kinds:
            if record.left() < 5:
                record.row("out of time", config=name, kind=kind)
                return
            with record.trying("stage", config=name, kind=kind):
                cfg = tiny(recipe(name))
                cfg.train.dtype, cfg.train.batch_size, cfg.train.accumulation = kind, 4, 1
                losses, _ = losses_and_seconds(ready(cfg, STEPS), STEPS)
                record.row(
                    "stage",
                    config=name,
                    kind=kind,
                    attention=os.environ.get("MEDUSA_JAX_ATTENTION", "library"),
                    platform=jax.default_backend(),
                    losses=losses,
                )


def large(record: Record) -> None:
    """Seconds of a step, and memory: the compiler's figure, and the device's."""
    for name, rows in LARGE[:1] if record.small else LARGE:
        if record.left() < 30 and not record.small:
            record.row("out of time", config=name)
            return
        with record.trying("training", config=name):
            cfg = recipe(name)
            if record.small:
                tiny(cfg)
            cfg.train.batch_size, cfg.train.accumulation = rows, 1
            cfg.model.path = ""
            begin = time.monotonic()
            job = ready(cfg, STEPS)
            spent = time.monotonic() - begin
            losses, seconds = losses_and_seconds(job, STEPS + 1)
            s = statistics.median(seconds[1:])
            stats = jax.devices()[0].memory_stats() or {}
            record.row(
                "training",
                config=name,
                rows=rows,
                seq_len=cfg.data.seq_len,
                seconds=s,
                tokens_per_second=rows * cfg.data.seq_len / s,
                ready_seconds=spent,
                device_bytes=stats.get("peak_bytes_in_use"),
                **dry.memory_of(job.step),
                losses=losses,
            )
            del job


def recipe(name: str) -> Config:
    """A configuration of this repository, to run on random rows."""
    cfg = cli.parse([f"--config=configs/{name}.py", f"--workdir={os.devnull}"])
    cfg.mesh = (1, 1, 1)
    cfg.train.heads_path = cfg.data.cache_features = ""
    return cfg


def tiny(cfg: Config) -> Config:
    """The recipe with a tiny model and short rows."""
    cfg.model.arch, cfg.data.seq_len, cfg.model.path = TINY, 128, ""
    if isinstance(cfg.heads, Eagle3Config):
        cfg.heads.tap_layers = "1,2,3"
    if cfg.heads.draft_vocab:
        cfg.heads.draft_vocab = 256
    return cfg


class Ready(NamedTuple):
    """A compiled training step and its arguments; it donates the state."""

    step: Compiled
    state: TrainState
    frozen: PyTree
    batch: PyTree


def ready(cfg: Config, steps: int) -> Ready:
    """Compile the step of a configuration of shapes, with random weights and random tokens.

    Raises:
      UserError: inconsistent sizes.
    """
    plan = RunPlan(cfg, dry=True)
    mesh, train, n = plan.mesh, plan.train, plan.heads.draft_vocab
    setup = load_setup(plan)
    if n:
        setup = setup.scoring(np.arange(n, dtype=np.int32), mesh)
    stage = make_stage(train, plan.arch, plan.groups, plan.drafter, plan.lora, steps, mesh)
    optimizer = make_optimizer(plan.optim, plan.groups, steps)
    state = init_state(stage, optimizer, mesh, setup.frozen, train.seed, setup.start)
    schedule = make_schedule(plan.optim, steps)
    step = make_step(stage, optimizer, schedule, train.seed, mesh)
    rows, accumulation = random_rows(cfg), train.accumulation
    row = {name: x[0] for name, x in rows.items()}
    shapes = batch_shapes(mesh, row, plan.microbatch, accumulation)
    compiled = compile_step(step, state, setup.frozen, shapes, mesh)
    batch = jax.block_until_ready(microbatches(mesh, rows, accumulation))
    return Ready(compiled, state, setup.frozen, batch)


def random_rows(cfg: Config) -> dict[str, np.ndarray]:
    """A batch of random tokens, all targets, one segment per row."""
    B, T = cfg.train.batch_size, cfg.data.seq_len
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, cfg.model.arch.vocab_size, (B, T)).astype(np.int32),
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "segment_ids": np.ones((B, T), np.int32),
        "counted": np.ones((B, T), bool),
    }


def losses_and_seconds(job: Ready, steps: int) -> tuple[list[list[float]], list[float]]:
    """The losses of each of the steps, and its seconds."""
    state, losses, seconds = job.state, [], []
    for _ in range(steps):
        begin = time.perf_counter()
        state, metrics = job.step(state, job.frozen, job.batch)
        losses.append(np.asarray(metrics["loss"], np.float64).ravel().tolist())
        seconds.append(time.perf_counter() - begin)
    return losses, seconds
