"""The drafters by name."""

import dataclasses
import importlib

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.heads.drafter import Drafter, NoDrafter
from medusa_jax.heads.names import BASELINES, DRAFTERS


def drafter_class(name: str) -> type[Drafter]:
    """Return the drafter class with that name.

    Raises:
      UserError: no drafter has this name; suggests the most similar one.
    """
    files = DRAFTERS | BASELINES
    if name not in files:
        raise UserError(
            f"unknown drafter {name!r} (there are: {', '.join(files)}){did_you_mean(name, files)}"
        )
    # A seam: configurations and files of heads name their drafter.
    module = importlib.import_module(f"medusa_jax.heads.{files[name]}")
    kinds = (kind for kind in vars(module).values() if isinstance(kind, type))
    return next(k for k in kinds if issubclass(k, Drafter) and k.name == name)


def whole_config(heads: HeadsConfig) -> HeadsConfig:
    """Return the configuration as the `Config` class of its drafter.

    A plain `HeadsConfig` fits any drafter; the drafter's additional fields get their defaults.

    Raises:
      UserError: an unknown drafter, or a configuration class of another one.
    """
    kind = drafter_class(heads.drafter)
    if type(heads) is HeadsConfig:
        return kind.Config(**dataclasses.asdict(heads))
    if type(heads) is not kind.Config:
        raise UserError(
            f"heads.drafter {heads.drafter!r} does not take the fields of a "
            f"{type(heads).__name__}: start from a configuration of that drafter"
        )
    return heads


def make_drafter(heads: HeadsConfig, llama: LlamaConfig) -> Drafter:
    """Build the drafter that `heads.drafter` names, for a backbone of the given shape.

    Raises:
      UserError: as for `whole_config`; an unknown LM-head kind, a rank larger than the LM head's,
        fields that the drafter refuses.
    """
    heads = whole_config(heads)
    least = {"n_heads": 1, "n_layers": drafter_class(heads.drafter).least_layers}
    for field, fewest in least.items():
        if getattr(heads, field) < fewest:
            raise UserError(
                f"heads.{field} must be at least {fewest}, not {getattr(heads, field)}"
            )
    if heads.lm_head not in ("own", "shared", "low_rank"):
        near = did_you_mean(heads.lm_head, ("own", "shared", "low_rank"))
        raise UserError(
            f"heads.lm_head is own, shared or low_rank, not {heads.lm_head!r}{near}"
        )
    if not 0 <= heads.draft_vocab <= llama.vocab_size:
        raise UserError(
            f"heads.draft_vocab is from 0 (all tokens) to {llama.vocab_size} (the vocabulary size), "
            f"not {heads.draft_vocab}"
        )
    outputs = heads.draft_vocab or llama.vocab_size
    widest = min(llama.d_model, outputs)
    if heads.lm_head == "low_rank" and not 1 <= heads.rank <= widest:
        raise UserError(
            f"heads.rank {heads.rank} does not fit an LM head of {llama.d_model} x "
            f"{outputs}: low_rank takes 1 to {widest}"
        )
    drafter = drafter_class(heads.drafter)(heads, llama)
    drafter.check()
    if drafter.n_heads < 1:
        raise UserError(f"{drafter.name} drafts at least 1 token, not {drafter.n_heads}")
    return drafter


def no_drafter(llama: LlamaConfig) -> Drafter:
    """The drafter of plain decoding; equal for all models of one shape."""
    return NoDrafter(HeadsConfig(), llama)
