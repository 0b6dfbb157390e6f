"""Draft heads: one file per paper, all under the contract of `drafter.py`."""

import difflib

from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Base, Drafter
from medusa_jax.heads.medusa import Medusa

DRAFTERS: dict[str, type[Drafter]] = {"medusa": Medusa}

__all__ = ["DRAFTERS", "Base", "Drafter", "make_drafter"]


def make_drafter(heads: HeadsConfig, llama: LlamaConfig) -> Drafter:
    """The drafter that `heads.drafter` names, for a backbone of the given shape.

    Raises:
      UserError: an unknown drafter or LM-head kind, or a rank beyond the LM head's.
    """
    if heads.drafter not in DRAFTERS:
        near = difflib.get_close_matches(heads.drafter, DRAFTERS, n=1, cutoff=0.0)
        raise UserError(
            f"unknown drafter {heads.drafter!r} (there are: {', '.join(DRAFTERS)}); "
            f"did you mean {near[0]!r}?"
        )
    if heads.lm_head not in ("own", "shared", "low_rank"):
        raise UserError(f"heads.lm_head is own, shared or low_rank, not {heads.lm_head!r}")
    widest = min(llama.d_model, llama.vocab_size)
    if heads.lm_head == "low_rank" and not 1 <= heads.rank <= widest:
        raise UserError(
            f"heads.rank {heads.rank} does not fit an LM head of {llama.d_model} x "
            f"{llama.vocab_size}: low_rank takes 1 to {widest}"
        )
    return DRAFTERS[heads.drafter](heads, llama)
