"""The variants of the study: trained parts, text and learning rates."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medusa_jax.api import DEMO
from medusa_jax.commands.flags import flag
from medusa_jax.config import (
    Config,
    DataConfig,
    HeadsConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    override,
)
from medusa_jax.training.plan import RunPlan
from medusa_jax.training.trainer import train_plan
from medusa_jax.whole_files import Json

HEADS_RATE, BACKBONE_RATE = 2e-3, 5e-4  # the paper's two-stage recipe


@dataclass(frozen=True, kw_only=True)
class Study:
    """Compare training recipes."""

    original: str = flag("token directory of held-out text of the backbone's own kind")
    out: str = flag("results, runs and table.md go there")
    model: str = flag("backbone (default: the demo's)", str(DEMO / "backbone"))
    variants: tuple[str, ...] = flag("comma-separated (default: all)", ())
    steps: int = flag("updates per variant", 300)
    seeds: int = flag("trainings per variant", 3)
    batch_size: int = flag("rows per update", 4)
    length: int = flag("tokens per row", 256)
    rank: int = flag("of the heads' LM heads", 64)
    distill: int = flag("continuations for self/", 640)
    prompts: int = flag("prompts of either text", 16)
    new_tokens: int = flag("tokens after each prompt", 96)
    rows: int = flag("held-out rows to evaluate", 64)
    tree: str = flag("tree of all variants", "cartesian:4,2,1,1")
    dtype: str = flag("type of the computation", "float32")


def variants() -> dict[str, tuple[str, list[Json]]]:
    """Name -> (description, runs in order, as the fields that differ from `recipe`).

    A run's "share" is its share of all steps; "heads" is the run whose heads it starts from.
    """
    lora = {"lora.rank": 32, "train.stage": "medusa2"}
    joint = lora | {"optim.lr": BACKBONE_RATE, "train.lambda_0": 0.2}
    first = {"train.stage": "medusa1", "optim.lr": HEADS_RATE, "share": 1 / 3}
    second = joint | {"share": 2 / 3, "heads": 0}
    heads = {"train.stage": "medusa1", "optim.lr": HEADS_RATE, "share": 1.0}
    direct = lora | {
        "optim.lr": HEADS_RATE, "optim.heads_lr_multiplier": 1.0, "train.lambda_0": 1.0,
        "share": 1.0,
    }  # fmt: skip
    return {
        "baseline": ("the backbone as it is", []),
        "direct": ("backbone and heads at one rate, fresh heads, lambda_0 = 1", [direct]),
        "medusa1": ("heads alone", [heads]),
        "medusa2": ("two stages: heads, then both (lambda_0 = 0.2, rates 1 : 4)", [first, second]),
        "medusa2-sine": (
            "both from the start, lambda_0 rising to 0.2 as a sine",
            [joint | {"share": 1.0, "train.lambda_0_schedule": "sine"}],
        ),
        "medusa2-kl": (
            "two stages, KL to the original in place of the labels",
            [first, second | {"train.backbone_loss": "kl"}],
        ),
        "medusa1-self": (
            "heads alone, on the backbone's own continuations",
            [heads | {"data": "self"}],
        ),
        "medusa1-nf4": ("heads alone, on a 4-bit backbone", [heads | {"model.quantise": "nf4"}]),
        "medusa1-8bit": (
            "heads alone, AdamW with 8-bit moments",
            [heads | {"optim.name": "adamw8bit"}],
        ),
    }  # fmt: skip


def recipe(study: Study, seed: int, data: Path) -> Config:
    """The configuration that all variants share."""
    return Config(
        model=ModelConfig(path=study.model),
        heads=HeadsConfig(n_heads=4, n_layers=1, lm_head="low_rank", rank=study.rank),
        data=DataConfig(
            source=str(data), format="tokens", seq_len=study.length, packing="first_fit", seed=seed
        ),
        optim=OptimConfig(warmup_steps=20, schedule="cosine"),
        lora=LoraConfig(rank=0),
        train=TrainConfig(
            batch_size=study.batch_size, dtype=study.dtype, remat=False, loss_chunk=128,
            log_every=20, save_every=10**9, keep_checkpoints=1, seed=seed,
        ),
        mesh=(1, 1, 1),
    )  # fmt: skip


def train_variant(
    study: Study, seed: int, runs: list[Json], folder: Path, out: Path
) -> tuple[str, str, float]:
    """Run one variant; returns (model directory, heads directory, last mean loss of the heads)."""
    exports: list[tuple[str, str]] = []
    last: Json = {}
    for number, fields in enumerate(runs):
        cfg = recipe(study, seed, out / fields.get("data", "new"))
        cfg.workdir = str(folder / f"run{number}")
        cfg.train.steps = max(round(study.steps * fields["share"]), 2)
        for name, value in fields.items():
            if "." in name:
                override(cfg, name, value)
        if cfg.train.stage == "medusa1":
            # Runs on the frozen backbone share its hidden states, whatever their seed.
            cfg.data.cache_features = "float32"
            cfg.data.features_path = str(out / "features")
        if "heads" in fields:
            cfg.train.heads_path = exports[fields["heads"]][1]
        os.makedirs(cfg.workdir, exist_ok=True)
        last = train_plan(RunPlan(cfg)) or last
        export = f"{cfg.workdir}/export"
        has_config = os.path.exists(f"{export}/config.json")
        exports.append((export, f"{export}/heads") if has_config else (study.model, export))
    loss = float(np.mean(last["loss"])) if last else float("nan")
    return (*exports[-1], loss)
