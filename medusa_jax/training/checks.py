"""Check a configuration before a run, and fit it to model and mesh; errors are one line each."""

import dataclasses
import typing
from operator import attrgetter

from jax.sharding import Mesh

from medusa_jax import typed
from medusa_jax.arch import LlamaConfig
from medusa_jax.config import Config, TrainConfig, fields_of
from medusa_jax.errors import UserError, between, one_of
from medusa_jax.files.hf_config import SCALINGS, SIZES
from medusa_jax.sharding import row_shards
from medusa_jax.training.partition import TABLE, trained_groups

OPTIMIZERS = ("adamw", "adamw8bit", "muon")
CHOICES = {
    "train.stage": tuple(dict.fromkeys(row.partition("/")[0] for row in TABLE)),
    "train.lambda_0_schedule": ("constant", "sine"),
    "train.backbone_loss": ("labels", "kl"),
    "model.quantise": ("", "int8", "nf4"),
    "model.arch.rope_scaling": ("none", *SCALINGS),
    "train.dtype": ("float32", "bfloat16", "float16", "float64"),
    "model.param_dtype": ("float32", "bfloat16", "float16"),
    "data.format": ("auto", "text", "sharegpt", "messages", "tokens"),
    "data.packing": ("first_fit", "concat"),
    "data.cache_features": ("", "float32", "bfloat16", "float8"),
    "optim.name": OPTIMIZERS,
    "optim.heads_name": ("", *OPTIMIZERS),
    "optim.moment_dtype": ("float32", "bfloat16"),
    "optim.schedule": ("cosine", "wsd", "constant"),
}
# Largest values of some numbers.
MOST = dict.fromkeys(("optim.b1", "optim.b2", "lora.dropout", "data.held_out"), 1 - 1e-6)
# Names of other projects.
ALIASES = {"chat": "messages", "openai": "messages", "chatml": "messages", "plain": "text"}
# Least values of numbers; of others 0.
LEAST = {f"model.arch.{name}": 1 for name in ("max_position", *SIZES.values())} | {
    "train.epochs": 1, "train.keep_checkpoints": 1, "data.eval_samples": 1,
    "train.batch_size": 1, "train.accumulation": 1, "train.loss_chunk": 1,
    "train.log_every": 1, "train.eval_every": 1, "train.save_every": 1,
    "train.max_bad_steps": 1, "train.levels": 1, "data.seq_len": 3,
    "optim.warmup_steps": -1, "heads.mask_token": -1, "model.arch.rope_theta": 1,
}  # fmt: skip


def check(cfg: Config) -> None:
    """Refuse unknown choices and inconsistent fields before anything is read.

    Raises:
      UserError: names the fields.
    """
    for path, allowed in CHOICES.items():
        one_of(path, attrgetter(path)(cfg), allowed, ALIASES)
    for path, owner, name in fields_of(cfg):
        kind, least = typing.get_type_hints(type(owner))[name], LEAST.get(path, 0)
        value = typed.read(path, getattr(owner, name), kind)
        if kind in (int, float):
            most = MOST.get(path, 2**31 - 1 if kind is int else 1e30)
            between(path, value, least, most)
    for wrong, problem in _contradictions(cfg):
        if wrong:
            raise UserError(problem)


def _contradictions(cfg: Config) -> list[tuple[bool, str]]:
    """(whether the configuration contradicts itself in this way, how to say so)."""
    t, model, data = cfg.train, cfg.model, cfg.data
    trained, kl = trained_groups(t, cfg.lora), t.backbone_loss == "kl"
    given = model.path or cfg.lora.rank or cfg.dry_run
    return [
        (
            bool(model.arch.n_heads % model.arch.n_kv_heads or model.arch.head_dim % 2),
            "model.arch.n_kv_heads must divide n_heads, and head_dim must be even",
        ),
        (
            bool(model.quantise) and "backbone" in trained,
            f"stage {t.stage} trains the backbone itself, which model.quantise {model.quantise!r} "
            "forbids: use adapters (lora.rank) or train only heads",
        ),
        (
            kl and set(trained) == {"heads"},
            "train.backbone_loss is kl, but medusa1 trains no backbone",
        ),
        (kl and not given, "train.backbone_loss kl needs a backbone: set model.path"),
        (
            bool(data.cache_features)
            and (t.stage, data.packing) != ("medusa1", "first_fit"),
            "data.cache_features needs a backbone and rows that do not change: train.stage medusa1 and "
            "data.packing first_fit",
        ),
        (
            bool(data.held_out) and not data.eval_source and data.packing != "first_fit",
            "data.held_out keeps whole samples: it needs data.packing first_fit",
        ),
        (
            bool(data.draft_vocab_from) and not cfg.heads.draft_vocab,
            "data.draft_vocab_from is set, but heads.draft_vocab is 0: heads score all tokens",
        ),
        (
            bool(t.feature_weight) and cfg.heads.lm_head != "shared",
            "train.feature_weight compares features with the inputs of the model's LM head: it needs "
            f"heads.lm_head shared, not {cfg.heads.lm_head!r}",
        ),
        (
            bool(t.heads_path) and "heads" not in trained,
            f"train.heads_path is set, but stage {t.stage} has no heads",
        ),
    ]


def settle(cfg: Config, arch: LlamaConfig, mesh: Mesh) -> Config:
    """The configuration of a run: a copy with the model's shape and the mesh's number of microbatches.

    Raises:
      UserError: sizes that do not fit together.
    """
    model = dataclasses.replace(cfg.model, arch=arch)
    accumulation = microbatches_on(mesh, cfg.train)
    train = dataclasses.replace(cfg.train, accumulation=accumulation)
    data = cfg.data
    cfg = dataclasses.replace(cfg, model=model, train=train)
    check(cfg)
    shards = row_shards(mesh)
    if train.batch_size % (accumulation * shards):
        raise UserError(
            f"train.batch_size {train.batch_size} is not a multiple of accumulation x data x fsdp "
            f"= {accumulation} x {shards}"
        )
    between("data.seq_len (positions of the model)", data.seq_len, 3, arch.max_position)
    return cfg


def microbatches_on(mesh: Mesh, train: TrainConfig) -> int:
    """The microbatches that a mesh needs for `train.accumulation`, which is given for one device.

    The least number with no more rows per device than on one device. The update is unchanged; fewer
    microbatches gather the weights and sum the gradients less often.
    """
    devices = row_shards(mesh)
    for n in range(1, train.accumulation + 1):
        rows, remainder = divmod(train.batch_size, n * devices)
        if not remainder and rows * train.accumulation <= train.batch_size:
            return n
    return train.accumulation
