"""The table of what each stage trains, by which optimizer and at which rate."""

from typing import NamedTuple

from medusa_jax.config import Config
from medusa_jax.errors import UserError
from medusa_jax.heads.registry import make_drafter


class Trains(NamedTuple):
    """How a group of variables is trained: fields of `optim` for its optimizer and rate.

    The rate is `optim.lr`, times the field `multiplier` if given.
    """

    rule: str = "name"
    multiplier: str = ""


_MAIN = Trains()
_HEADS = Trains("heads_name", "heads_lr_multiplier")

# Stage -> the groups of variables that it trains; "/lora" is for lora.rank > 0. Other groups are frozen: a
# separate tree without gradient or optimizer state.
TABLE: dict[str, dict[str, Trains]] = {
    "backbone": {"backbone": _MAIN},
    "backbone/lora": {"lora": _MAIN},
    "medusa1": {"heads": _MAIN},
    "medusa2": {"backbone": _MAIN, "heads": _HEADS},
    "medusa2/lora": {"lora": _MAIN, "heads": _HEADS},
    "native": {"backbone": _MAIN, "heads": _HEADS},
}


def trained_groups(cfg: Config) -> dict[str, Trains]:
    """The row of `TABLE` for this run.

    Raises:
      UserError: an unknown stage, or options that it does not support.
    """
    stage = cfg.train.stage
    row = stage + ("/lora" if cfg.lora.rank else "")
    if stage not in TABLE:
        raise UserError(f"train.stage is one of {', '.join(TABLE)}, not {stage!r}")
    if row not in TABLE:
        raise UserError(f"stage {stage} has no adapters: set lora.rank to 0")
    groups = TABLE[row]
    if cfg.model.quantise and "backbone" in groups:
        raise UserError(
            f"stage {stage} trains the backbone itself, which model.quantise "
            f"{cfg.model.quantise!r} forbids: use adapters (lora.rank) or train only heads"
        )
    if cfg.train.backbone_loss == "kl":
        if set(groups) == {"heads"}:
            raise UserError("train.backbone_loss is kl, but medusa1 trains no backbone")
        if not cfg.model.path and not cfg.lora.rank and not cfg.dry_run:
            raise UserError("train.backbone_loss kl needs a backbone: set model.path")
    return groups


def heads_taps(cfg: Config) -> tuple[int, ...]:
    """Layers of the backbone that the heads of this run read (`Drafter.taps`); none without heads."""
    if "heads" not in trained_groups(cfg):
        return ()
    return make_drafter(cfg.heads, cfg.model.arch).taps


def hidden_width(cfg: Config) -> int:
    """E, the width of the hidden states that the loss reads, tapped streams included."""
    return cfg.model.arch.d_model * (1 + len(heads_taps(cfg)))
