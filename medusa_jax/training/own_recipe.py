"""The recipe of heads for a model of one's own (`medusa train` without --config, configs/own.py, `medusa own`), and what each family changes in a recipe."""

import dataclasses
import math
import os
from pathlib import Path

import jax

from medusa_jax.config import (
    Config,
    DataConfig,
    HeadsConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    override,
)
from medusa_jax.errors import UserError
from medusa_jax.files.hf import model_shape
from medusa_jax.files.hub import resolve
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.heads.registry import drafter_class, whole_config
from medusa_jax.sharding import make_mesh, row_shards
from medusa_jax.training.data.sources import files_in, names
from medusa_jax.whole_files import Json

# DFlash and DSpark.
BLOCKS: Json = {
    "heads.draft_vocab": 0, "optim.lr": 2e-3, "train.label_weight": 0.1, "train.teacher_weight": 0.0,
    "train.distance_weight": 0.9, "train.lambda_decay": 0.7788,
}  # fmt: skip
# By family, the fields that differ from Medusa's recipe: in `get_config`, configs/smollm2_*.py and configs/demo_*.py.
FAMILIES: dict[str, Json] = {
    "hydra": {"heads.skip": "fixed", "optim.lr": 2e-3},
    "hydrapp": {"heads.skip": "fixed", "heads.dropout": 0.0, "optim.lr": 2e-3},
    "amphista": {"optim.lr": 2e-3},
    "amphista_alpha": {"optim.lr": 2e-3},
    # vLLM reads EAGLE-1 without the bias.
    "eagle": {"heads.fc_bias": False, "optim.lr": 1e-3, "train.feature_weight": 1.0},
    "eagle3": {
        "heads.lm_head": "own", "optim.lr": 2e-3, "train.label_weight": 0.0,
        "train.levels": 4, "train.lambda_decay": 0.8,
    },
    # Other engines score all tokens.
    "dflash": BLOCKS | {"heads.n_layers": 2},
    "dspark": BLOCKS | {"heads.markov_rank": 64},
}  # fmt: skip
# Backbones from this vocabulary on have a draft vocabulary.
LARGE_VOCABULARY = 16_384
# Updates that heads on a small text need, and the most passes over it for them.
UPDATES, PASSES = 400, 10
# Rows of a microbatch on one device.
MICROBATCH = 8
# Fields of a trial on a CPU.
ON_A_CPU: Json = {
    "data.max_samples": 1000, "data.seq_len": 512, "train.batch_size": 4,
    "train.steps": 400, "train.log_every": 10, "train.eval_every": 100, "train.save_every": 100,
    "data.cache_features": "bfloat16", "model.param_dtype": "float32", "mesh": (1, 1, 1),
}  # fmt: skip


def get_config() -> Config:
    """Heads on the frozen model, on an accelerator."""
    return Config(
        model=ModelConfig(param_dtype="bfloat16"),
        heads=HeadsConfig(drafter="medusa", n_heads=4, n_layers=1, lm_head="shared"),
        data=DataConfig(held_out=0.05, eval_samples=128, seq_len=2048, max_repeats=0.5),
        optim=OptimConfig(lr=3e-3, warmup_steps=-1),
        train=TrainConfig(
            stage="medusa1",
            batch_size=64,  # at most: `follow_text`
            epochs=2,
            remat=False,
            lambda_decay=1.0,
            label_weight=0.1,
            teacher_weight=1.0,
            eval_every=200,
            save_every=200,
        ),
        workdir="runs/own",
    )


def in_family(cfg: Config, family: str, fields: Json) -> Config:
    """A recipe for Medusa heads, changed to another family: its `FAMILIES`, then these fields."""
    return with_fields(cfg, {"heads.drafter": family} | FAMILIES[family] | fields)


def with_fields(cfg: Config, fields: Json) -> Config:
    """Set the heads.drafter of a recipe for Medusa heads, then all fields, also those that this drafter adds."""
    heads = dataclasses.replace(cfg.heads, drafter=fields["heads.drafter"])
    cfg.heads = whole_config(heads)
    for name, value in fields.items():
        override(cfg, name, value)
    return cfg


def recipe_with(fields: Json, workdir: str) -> Config:
    """The whole recipe with these fields; raises as `complete` and `override`."""
    cfg = with_fields(get_config(), fields)
    cfg.workdir = os.path.abspath(workdir)
    return complete(cfg, frozenset(fields))


def complete(cfg: Config, names: frozenset[str]) -> Config:
    """Choose sizes by model, family and device, for all fields that the command line (`names`) does not set.

    Raises:
      UserError: no model, no data, or an unknown family.
    """
    if not cfg.model.path:
        raise UserError(
            "set --config.model.path: a directory, a .gguf file, a hub id or a name; or give --config=FILE.py, "
            "another recipe (see --help)"
        )
    if not cfg.data.source:
        raise UserError("set --config.data.source: a file of JSON lines, or a dataset's id")
    if not drafter_class(cfg.heads.drafter).trained:  # refuses unknown names
        raise UserError(f"{cfg.heads.drafter} has no heads: choose {', '.join(DRAFTERS)}")
    arch = model_shape(resolve(cfg.model.path, ["config.json"]))
    fields = FAMILIES.get(cfg.heads.drafter, {}).copy()
    if jax.default_backend() == "cpu":
        fields = ON_A_CPU | fields
    length = fields.get("data.seq_len", cfg.data.seq_len)
    fields["data.seq_len"] = min(length, arch.max_position)
    if arch.vocab_size >= LARGE_VOCABULARY:
        fields.setdefault("heads.draft_vocab", 8192)
    if "train.levels" in fields:
        fields["train.levels"] = min(fields["train.levels"], cfg.heads.n_heads)
    if getattr(cfg.heads, "confidence", False):
        fields["train.confidence_weight"] = 1.0
    for name, value in fields.items():
        if name not in names:
            override(cfg, name, value)
    follow_text(cfg, names)
    return cfg


def follow_text(cfg: Config, names: frozenset[str]) -> None:
    """For a small text, use smaller batches and more epochs, so that training still makes about `UPDATES` updates."""
    train, tokens = cfg.train, about_tokens(cfg.data.source)
    if "train.batch_size" not in names:
        train.batch_size = batch_for(cfg, tokens)
    if "train.accumulation" not in names:
        train.accumulation = max(1, train.batch_size // MICROBATCH)
    if "train.epochs" not in names:
        positions = UPDATES * train.batch_size * cfg.data.seq_len
        wanted = math.ceil(positions / max(tokens, 1))
        train.epochs = min(PASSES, max(train.epochs, wanted))


def batch_for(cfg: Config, tokens: float) -> int:
    """Largest batch (at most `train.batch_size`) with which `PASSES` epochs make at least `UPDATES` updates."""
    rows = row_shards(make_mesh(cfg.mesh))
    most = min(cfg.train.batch_size, PASSES * tokens / (UPDATES * cfg.data.seq_len))
    while 2 * rows <= most:
        rows *= 2
    return rows


def about_tokens(source: str) -> float:
    """Roughly the tokens of a `data.source`, at four bytes each; infinite if its files are not on this machine."""
    files = []
    for name in names(source):
        tokens = Path(name, "tokens.npy")
        found = files_in(name) if os.path.isdir(name) else [Path(name)]
        files += [tokens] if tokens.is_file() else found
    known = all(file.is_file() for file in files)
    return sum(file.stat().st_size for file in files) / 4 if known else math.inf
