"""The table of what each stage trains."""

from medusa_jax.errors import UserError

# Stage -> the groups of variables that it trains; "/lora" is for lora.rank > 0. Other groups are frozen: they are in
# another tree, which has no gradient and no optimizer state.
TABLE: dict[str, tuple[str, ...]] = {
    "backbone": ("backbone",),
    "backbone/lora": ("lora",),
    "medusa1": ("heads",),
    "medusa2": ("backbone", "heads"),
    "medusa2/lora": ("lora", "heads"),
    "native": ("backbone", "heads"),
}


def trained_groups(stage: str, lora_rank: int) -> tuple[str, ...]:
    """The row of `TABLE` for a run.

    Raises:
      UserError: adapters in a stage without them.
    """
    row = stage + ("/lora" if lora_rank else "")
    if row not in TABLE:
        raise UserError(f"stage {stage} has no adapters: set lora.rank to 0")
    return TABLE[row]
