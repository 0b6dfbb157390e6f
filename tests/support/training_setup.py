"""What the training tests share: a tiny backbone's shape and token arrays for it."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tiny import tiny_arch

from medusa_jax.config import (
    Config,
    DataConfig,
    HeadsConfig,
    LlamaConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from medusa_jax.heads.registry import make_drafter
from medusa_jax.sharding import PyTree
from medusa_jax.training import resume, trainer
from medusa_jax.training.data.rows import ROW, TokenRows
from medusa_jax.training.data.texts import read_texts
from medusa_jax.training.losses.objectives import hidden_states
from medusa_jax.training.models import Setup, load_setup
from medusa_jax.training.partition import trained_groups
from medusa_jax.training.placement import batch_shapes
from medusa_jax.training.plan import RunPlan
from medusa_jax.training.stage import Stage, make_stage

ROOT = pathlib.Path(__file__).parents[2]
VOCAB = 64

CONFIG_FILE = """
import sys
sys.path.insert(0, {tests!r})
from training_setup import tiny_config


def get_config():
    return tiny_config({data!r}, {stage!r})
"""


def training_arch(**fields) -> LlamaConfig:
    """One layer; kernels whose sizes many devices divide."""
    sizes = {"vocab_size": VOCAB, "n_layers": 1, "n_heads": 2, "head_dim": 8, "d_ff": 32}
    return tiny_arch(**(sizes | {"max_position": 64} | fields))


def tiny_config(data: str, stage: str = "backbone", **train) -> Config:
    """16 steps of 8 rows of 16 tokens, everything logged."""
    values = {"stage": stage, "batch_size": 8, "steps": 16, "loss_chunk": 8}
    values |= {"log_every": 1, "eval_every": 8, "save_every": 4}
    values |= {"dtype": "float32", "remat": False}
    return Config(
        model=ModelConfig(arch=training_arch()),
        heads=HeadsConfig(n_heads=3),
        data=DataConfig(source=data, seq_len=16, packing="concat"),
        optim=OptimConfig(name="muon", lr=5e-3, warmup_steps=2),
        train=TrainConfig(**(values | train)),
        mesh=(1, 1, 1),
    )


def write_tokens(directory: pathlib.Path, n: int = 4000, seed: int = 0) -> str:
    """A token directory: a noisy walk over the vocabulary, samples of 5 to 40 tokens."""
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    steps = np.where(rng.random(n) < 0.7, 1, rng.integers(0, VOCAB, n))
    np.save(directory / "tokens.npy", (np.cumsum(steps) % VOCAB).astype(np.uint16))
    starts = np.cumsum(np.concatenate([[0], rng.integers(5, 40, n // 20)]))
    np.save(directory / "doc_starts.npy", starts[starts < n].astype(np.int64))
    return str(directory)


def write_config(directory: pathlib.Path, data: str, stage: str = "backbone") -> str:
    """A configuration file for the command line."""
    file = directory / f"{stage}.py"
    tests = str(pathlib.Path(__file__).parent)
    file.write_text(CONFIG_FILE.format(tests=tests, data=data, stage=stage))
    return str(file)


def command(*args: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *args]


def stage_of(cfg: Config, steps: int = 16, mesh: Any = None) -> Stage:
    """The stage of a configuration."""
    groups, arch = groups_of(cfg), cfg.model.arch
    drafter = make_drafter(cfg.heads, arch) if "heads" in groups else None
    return make_stage(cfg.train, arch, groups, drafter, cfg.lora, steps, mesh)


def hidden_of(cfg: Config) -> Callable[[PyTree, PyTree], jax.Array]:
    """(frozen, batch) -> the hidden states that heads read."""
    stage = stage_of(cfg)
    return jax.jit(lambda frozen, x: hidden_states(stage.backbone(frozen), x))


def groups_of(cfg: Config) -> tuple[str, ...]:
    """The trained groups of a configuration."""
    return trained_groups(cfg.train.stage, cfg.lora.rank)


def setup_of(cfg: Config, mesh: Any) -> Setup:
    """The loaded models of a configuration."""
    return load_setup(RunPlan(cfg, mesh, dry=True))


def texts_of(cfg: Config) -> list[TokenRows]:
    """The texts of a configuration."""
    size = cfg.model.arch.vocab_size
    return read_texts(cfg.data, cfg.model.tokenizer_path, cfg.workdir, size).train


def changes(cfg: Config) -> dict[str, str]:
    """What changed since the last start."""
    return resume.changes(cfg.workdir, dataclasses.asdict(cfg))


def run(cfg: Config, workdir: pathlib.Path) -> None:
    """Train in a directory."""
    cfg.workdir = str(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    trainer.train_plan(RunPlan(cfg))


def records(workdir: pathlib.Path, kind: str = "train") -> list[dict[str, Any]]:
    """A run's log so far, without a line that is being written."""
    log = workdir / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [record for record in found if record["kind"] == kind]


def packed_batch(rng, lengths, T: int, counted: float = 1.0) -> dict[str, np.ndarray]:
    """Rows of T random tokens: texts of these lengths one after the other, then padding.

    Args:
      counted: the share of tokens that teach.
    """
    shape = len(lengths), T
    batch = {"tokens": rng.integers(0, VOCAB, shape, np.int32)}
    batch |= {name: np.zeros(shape, np.int32) for name in ("positions", "segment_ids")}
    batch["counted"] = rng.random(shape) < counted
    for row, of_row in enumerate(lengths):
        n = sum(of_row)
        batch["positions"][row, :n] = np.concatenate([np.arange(x) for x in of_row])
        batch["segment_ids"][row, :n] = np.repeat(np.arange(len(of_row)) + 1, of_row)
    return batch


def abstract_batch(cfg: Config, mesh: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and placement of a batch without hidden states."""
    T, train = cfg.data.seq_len, cfg.train
    row = {name: jax.ShapeDtypeStruct((T,), np.dtype(kind)) for name, kind in ROW.items()}
    micro = train.batch_size // train.accumulation
    return batch_shapes(mesh, row, micro, train.accumulation)
