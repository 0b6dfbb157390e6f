"""Seconds and memory of a training step, compared with a naive implementation.

    python -m research train_cost --config=configs/demo_medusa.py --steps=10 \\
        --config.model.path=medusa_jax/demo/backbone [--only=chunked]

The shape is that of the directory `model.path`, or `model.arch`. The step is the one that training
runs, on random weights and random tokens, all of which are targets. "naive" is Medusa-1 with
equation 1 as written: the logits of all heads and positions at once (K x B x T x V), and EAGLE's
levels unrolled over whole rows (`equation_1.py`).
"""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from medusa_jax.commands import train as cli
from medusa_jax.config import Config
from medusa_jax.console import inform, run_main
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.files.hf_config import read_config
from medusa_jax.files.hub import is_here, resolve
from medusa_jax.heads.drafter import Backbone
from medusa_jax.heads.optional import loss_view
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.llama import Llama
from medusa_jax.sharding import PyTree, make_mesh
from medusa_jax.training import checks, dry, losses
from medusa_jax.training.data.hidden_store import encode
from medusa_jax.training.optim.optimizer import make_optimizer, make_schedule
from medusa_jax.training.partition import trained_groups
from medusa_jax.training.placement import batch_shapes, compile_step, microbatches
from medusa_jax.training.setup import load_setup, with_draft_vocab
from medusa_jax.training.stage import Stage, make_stage
from medusa_jax.training.trainer import TrainState, init_state, make_step
from research.equation_1 import equation_1

MEMORY = ("temporary_bytes", "argument_bytes", "peak_bytes")
HEADER = (
    "loss", "s per step", "tokens/s", "temporaries MiB", "arguments MiB", "peak MiB"
)  # fmt: skip


def naive_stage(stage: Stage, cfg: Config) -> Stage:
    """Medusa-1 with `equation_1`; its sums are zero, since nothing logs them."""
    drafter = make_drafter(cfg.heads, cfg.model.arch)
    llama = Llama(cfg.model.arch, jnp.dtype(cfg.train.dtype), taps=drafter.taps)
    view = loss_view(drafter, cfg.train.levels)
    zeros = jnp.zeros((len(stage.offsets),))
    empty = losses.Sums(*[zeros] * len(losses.Sums._fields))

    def loss(
        params: PyTree, frozen: PyTree, inputs: losses.StepInputs
    ) -> tuple[jax.Array, losses.Sums]:
        backbone = Backbone(llama, frozen["backbone"])
        return equation_1(params["heads"], backbone, view, cfg.train, inputs.batch), empty

    return dataclasses.replace(stage, loss=loss, ranks=None)


class Ready(NamedTuple):
    """A compiled training step and its arguments; it donates the state."""

    step: Compiled
    state: TrainState
    frozen: PyTree
    batch: PyTree


def ready(cfg: Config, steps: int, naive: bool = False) -> Ready:
    """Compile the step of a configuration, with random weights and random tokens.

    Raises:
      UserError: inconsistent sizes, or a draft vocabulary for the naive loss.
    """
    mesh = make_mesh(cfg.mesh)
    arch = cfg.model.arch
    if is_here(cfg.model.path):
        arch = read_config(resolve(cfg.model.path, ["config.json"]))
    cfg.model.path = ""  # shapes and random weights
    cfg = checks.settle(cfg, arch, mesh)
    groups = trained_groups(cfg.train, cfg.lora)
    setup = load_setup(cfg.model, cfg.heads, cfg.train, groups, mesh)
    if n := cfg.heads.draft_vocab:
        if naive:
            raise UserError("the naive loss scores all tokens: set heads.draft_vocab to 0")
        setup = with_draft_vocab(setup, mesh, lambda: np.arange(n, dtype=np.int32))
    stage = make_stage(cfg.train, arch, cfg.heads, cfg.lora, steps, mesh)
    if naive:
        stage = naive_stage(stage, cfg)
    optimizer = make_optimizer(cfg.optim, groups, steps)
    state = init_state(stage, optimizer, mesh, setup.frozen, cfg.train.seed, setup.start)
    schedule = make_schedule(cfg.optim, steps)
    step_fn = make_step(stage, optimizer, schedule, cfg.train.seed, mesh)
    rows = random_rows(cfg, stage.width)
    accumulation = cfg.train.accumulation
    micro, row = cfg.train.batch_size // accumulation, {k: x[0] for k, x in rows.items()}
    shapes = batch_shapes(mesh, row, micro, accumulation)
    compiled = compile_step(step_fn, state, setup.frozen, shapes, mesh)
    batch = microbatches(mesh, rows, accumulation)
    return Ready(compiled, state, setup.frozen, jax.block_until_ready(batch))


def measure(cfg: Config, steps: int, naive: bool) -> dict[str, float]:
    """Median seconds per step, and bytes as planned by the compiler and as seen by the device.

    `peak_bytes` is the device's peak since the process started, so measure the smaller program first;
    0 if the backend does not count it (CPU).
    """
    compiled, state, frozen, batch = ready(cfg, steps, naive)
    seconds = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        state, metrics = compiled(state, frozen, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - begin)
    if bool(np.asarray(metrics["skipped"])):
        raise UserError("the measured step was skipped: its loss is not finite")
    stats = jax.local_devices()[0].memory_stats() or {}
    measured = {"seconds": float(np.median(seconds[1:]))}
    peak = {"peak_bytes": stats.get("peak_bytes_in_use", 0)}
    return measured | dry.memory_of(compiled) | peak


def random_rows(cfg: Config, width: int) -> dict[str, np.ndarray]:
    """A batch of random tokens, all targets, one segment per row; with hidden states if cached.

    Args:
      width: of hidden states.
    """
    B, T = cfg.train.batch_size, cfg.data.seq_len
    rng = np.random.default_rng(0)
    batch: dict[str, np.ndarray] = {
        "tokens": rng.integers(0, cfg.model.arch.vocab_size, (B, T)).astype(np.int32),
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "segment_ids": np.ones((B, T), np.int32),
        "counted": np.ones((B, T), bool),
    }
    if kind := cfg.data.cache_features:
        hidden = rng.standard_normal((B, T, width)).astype(np.float32)
        batch["hidden"] = np.asarray(
            encode(kind, jnp.asarray(hidden), cfg.model.arch.d_model)
        )
    return batch


def run(args: Sequence[str]) -> int:
    """Measure both losses, if the stage has both, and print the table."""
    own = [a for a in args if a.startswith(("--steps=", "--only="))]
    given = dict(a[2:].split("=", 1) for a in own)
    rest = [a for a in args if a not in own]
    cfg = cli.parse([*rest, f"--workdir={os.devnull}"])
    tokens = cfg.train.batch_size * cfg.data.seq_len
    print(f"stage {cfg.train.stage}, {cfg.heads.n_heads} heads, "
          f"{cfg.train.batch_size} x {cfg.data.seq_len} tokens in {cfg.train.dtype}, "
          f"{jax.default_backend()}")  # fmt: skip
    kinds = ("chunked", "naive") if cfg.train.stage == "medusa1" else ("chunked",)
    if (only := given.get("only", kinds[0])) not in kinds:
        raise UserError(f"--only is {' or '.join(kinds)} here, not {only!r}")
    rows = []
    for kind in [only] if "only" in given else kinds:
        try:
            found = measure(cfg, int(given.get("steps", "10")), kind == "naive")
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            inform(f"{kind}: out of device memory")
            continue
        seconds = found["seconds"]
        mib = (f"{found[name] / 2**20:,.0f}" for name in MEMORY)
        rows.append((kind, f"{seconds:.4f}", f"{tokens / seconds:,.0f}", *mib))
        inform("; ".join(f"{h} {x}" for h, x in zip(HEADER, rows[-1])))
    print(markdown_table(HEADER, rows))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    args = sys.argv[1:] if argv is None else argv
    if not args or "--help" in args:
        print(__doc__)
        return 0
    return run_main(lambda: run(args))
