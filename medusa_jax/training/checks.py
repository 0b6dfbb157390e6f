"""Checks of a configuration before a run; each problem is a one-line error."""

from operator import attrgetter

from jax.sharding import Mesh

from medusa_jax.config import Config
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.sharding import row_shards
from medusa_jax.training.hidden_store import STORED
from medusa_jax.training.partition import trained_groups

CHOICES = {
    "train.stage": ("backbone", "medusa1", "medusa2", "native"),
    "train.lambda_0_schedule": ("constant", "sine"),
    "train.backbone_loss": ("labels", "kl"),
    "model.quantise": ("", "int8", "nf4"),
    "train.dtype": ("float32", "bfloat16", "float16", "float64"),
    "model.param_dtype": ("float32", "bfloat16", "float16"),
    "data.format": ("auto", "text", "sharegpt", "messages", "tokens"),
    "data.packing": ("first_fit", "concat"),
    "data.cache_features": ("", *STORED),
    "optim.name": ("adamw", "adamw8bit", "muon"),
    "optim.heads_name": ("", "adamw", "adamw8bit", "muon"),
    "optim.moment_dtype": ("float32", "bfloat16"),
    "optim.schedule": ("cosine", "wsd", "constant"),
}
# Names of other projects.
ALIASES = {"chat": "messages", "openai": "messages", "chatml": "messages", "plain": "text"}
# Least values.
LEAST = {
    "train.epochs": 1, "train.keep_checkpoints": 1, "data.eval_samples": 1,
    "train.batch_size": 1, "train.accumulation": 1, "train.loss_chunk": 1,
    "train.log_every": 1, "train.eval_every": 1, "train.save_every": 1,
    "train.max_bad_steps": 1, "data.seq_len": 1, "train.steps": 0,
    "model.add_layers": 0, "lora.rank": 0, "optim.lr": 0, "optim.warmup_steps": 0,
    "optim.weight_decay": 0, "optim.clip_norm": 0, "train.induction_weight": 0,
}  # fmt: skip


def check_choices(cfg: Config) -> None:
    """Refuse an unknown choice and suggest the nearest known one."""
    for path, allowed in CHOICES.items():
        value = attrgetter(path)(cfg)
        if value not in allowed:
            aliases = {a: b for a, b in ALIASES.items() if b in allowed}
            known = " or ".join(name or "empty" for name in allowed)
            near = did_you_mean(value, allowed, aliases)
            raise UserError(f"{path} is {known}, not {value!r}{near}")


def fit_accumulation(cfg: Config, mesh: Mesh) -> None:
    """Reduce `train.accumulation`, given for one device, to what a mesh needs.

    Takes the least number of microbatches with no more rows per device than on one device. The update is
    unchanged; fewer microbatches gather the weights and sum the gradients less often.
    """
    t, devices = cfg.train, row_shards(mesh)
    for n in range(1, t.accumulation + 1):
        rows, remainder = divmod(t.batch_size, n * devices)
        if not remainder and rows * t.accumulation <= t.batch_size:
            t.accumulation = n
            return


def check(cfg: Config, mesh: Mesh) -> None:
    """Refuse unknown choices and inconsistent fields before anything is compiled.

    Raises:
      UserError: names the fields.
    """
    check_choices(cfg)
    trained_groups(cfg)  # raises for options that the stage does not support
    t = cfg.train
    for path, least in LEAST.items():
        if not (value := attrgetter(path)(cfg)) >= least:  # also refuses NaN
            raise UserError(f"{path} must be at least {least}, not {value}")
    for path in ("optim.b1", "optim.b2", "lora.dropout"):
        if not 0 <= (share := attrgetter(path)(cfg)) < 1:
            raise UserError(f"{path} must be from 0 to below 1, not {share}")
    if cfg.data.cache_features and t.stage != "medusa1":
        raise UserError(
            f"data.cache_features needs a backbone that does not change: train.stage medusa1, "
            f"not {t.stage}"
        )
    if cfg.data.cache_features and cfg.data.packing != "first_fit":
        raise UserError(
            "data.cache_features needs data.packing first_fit: 'concat' cuts the text at other "
            "places in every epoch"
        )
    if cfg.data.draft_vocab_from and not cfg.heads.draft_vocab:
        raise UserError(
            "data.draft_vocab_from is set, but heads.draft_vocab is 0: heads score all tokens"
        )
    if t.feature_weight and cfg.heads.lm_head != "shared":
        raise UserError(
            "train.feature_weight compares features with the inputs of the model's LM head: it needs "
            f"heads.lm_head shared, not {cfg.heads.lm_head!r}"
        )
    shards = row_shards(mesh)
    if t.batch_size % (t.accumulation * shards):
        raise UserError(
            f"train.batch_size {t.batch_size} is not a multiple of accumulation x data x fsdp "
            f"= {t.accumulation} x {shards}"
        )
    if cfg.data.seq_len > cfg.model.arch.max_position:
        raise UserError(
            f"data.seq_len {cfg.data.seq_len} exceeds the model's {cfg.model.arch.max_position} "
            f"positions"
        )
