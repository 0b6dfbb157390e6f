"""The table of what each stage trains, by which optimizer and at which rate."""

from typing import NamedTuple

from medusa_jax.errors import UserError


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


def trained_groups(stage: str, lora_rank: int) -> dict[str, Trains]:
    """The row of `TABLE` for a run.

    Raises:
      UserError: an unknown stage, or adapters in a stage without them.
    """
    row = stage + ("/lora" if lora_rank else "")
    if stage not in TABLE:
        raise UserError(f"train.stage is one of {', '.join(TABLE)}, not {stage!r}")
    if row not in TABLE:
        raise UserError(f"stage {stage} has no adapters: set lora.rank to 0")
    return TABLE[row]
