"""Drafters: one file per paper, all with the contract of `drafter.py`.

Every drafter in this package is registered under its `name` automatically. `DRAFTERS` have heads,
which are trained and stored; `BASELINES` have none.
"""

import dataclasses
import importlib
import pkgutil

from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.heads.drafter import Backbone, Drafter, NoDrafter

__all__ = [
    "BASELINES",
    "DRAFTERS",
    "Backbone",
    "Drafter",
    "drafter_class",
    "make_drafter",
    "no_drafter",
    "whole_config",
]


def _find() -> dict[str, type[Drafter]]:
    """Drafters with a name in this package's files, by name."""
    found: dict[str, type[Drafter]] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Drafter) and kind.name:
                found[kind.name] = kind
    return found


_ALL = _find()
DRAFTERS: dict[str, type[Drafter]] = {n: kind for n, kind in _ALL.items() if kind.trained}
BASELINES: dict[str, type[Drafter]] = {
    n: kind for n, kind in _ALL.items() if not kind.trained
}


def drafter_class(name: str) -> type[Drafter]:
    """Return the drafter class with that name.

    Raises:
      UserError: there is none; suggests the most similar name.
    """
    if name not in _ALL:
        raise UserError(
            f"unknown drafter {name!r} (there are: {', '.join(_ALL)}){did_you_mean(name, _ALL)}"
        )
    return _ALL[name]


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
    return drafter


def no_drafter(llama: LlamaConfig) -> Drafter:
    """The drafter of plain decoding; equal for all models of one shape."""
    return NoDrafter(HeadsConfig(), llama)
