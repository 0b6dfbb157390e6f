"""The drafters by name."""

import dataclasses
import importlib

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError, between, one_of
from medusa_jax.heads.drafter import Drafter, NoDrafter
from medusa_jax.heads.names import BASELINES, DRAFTERS
from medusa_jax.tree.tree import MOST_DEEP


def drafter_class(name: str) -> type[Drafter]:
    """Return the drafter class with that name.

    Raises:
      UserError: no drafter has this name; suggests the most similar one.
    """
    files = DRAFTERS | BASELINES
    one_of("a drafter", name, files)
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
        between(f"heads.{field}", getattr(heads, field), fewest, MOST_DEEP)
    one_of("heads.lm_head", heads.lm_head, ("own", "shared", "low_rank"))
    between("heads.draft_vocab", heads.draft_vocab, 0, llama.vocab_size)
    outputs = heads.draft_vocab or llama.vocab_size
    widest = min(llama.d_model, outputs)
    if heads.lm_head == "low_rank":
        between("heads.rank", heads.rank, 1, widest)
    drafter = drafter_class(heads.drafter)(heads, llama)
    drafter.check()
    between(f"the number of drafts of {drafter.name}", drafter.n_heads, 1, MOST_DEEP)
    return drafter


def no_drafter(llama: LlamaConfig) -> Drafter:
    """The drafter of plain decoding; equal for all models of one shape."""
    return NoDrafter(HeadsConfig(), llama)
