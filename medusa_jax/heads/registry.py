"""The drafters by name: those of this package, entry points of others, and `module:Class`."""

import dataclasses
import importlib
import sys
from functools import cache
from importlib.metadata import entry_points

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError, between, one_of
from medusa_jax.heads.drafter import Drafter, NoDrafter
from medusa_jax.heads.names import BASELINES, DRAFTERS, ENTRY_POINTS, is_module_class
from medusa_jax.tree.tree import MOST_DEEP


@cache
def installed() -> dict[str, str]:
    """Name and class of the drafters that other installed packages declare as entry points."""
    entries = entry_points(group=ENTRY_POINTS)
    return {e.name: e.value for e in entries if e.name not in DRAFTERS | BASELINES}


def drafter_class(name: str) -> type[Drafter]:
    """Return the drafter class with that name, or the class that `module:Class` names.

    Raises:
      UserError: no drafter has this name (suggests the most similar one), or the class cannot be imported or
        is not a drafter.
    """
    classes = DRAFTERS | BASELINES
    if name not in classes:
        classes = classes | installed()
    if name not in classes and not is_module_class(name):
        one_of("a drafter", name, classes)
    target = classes.get(name, name)
    module, _, attribute = target.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise UserError(f"the drafter {name!r} cannot be imported: {error}") from None
    if not (isinstance(kind, type) and issubclass(kind, Drafter)):
        raise UserError(
            f"{target!r} is not a class of drafters (heads/drafter.py: Drafter)"
        )
    if kind.Config.__hash__ is None:
        raise UserError(
            f"{target!r}: its Config cannot be a static argument: declare it with @dataclass(unsafe_hash=True)"
        )
    return kind


def stored_drafter_class(name: str, file: str) -> type[Drafter]:
    """Return the drafter class that a file names. A file does not choose modules to import.

    Raises:
      UserError: as `drafter_class`; `module:Class` of a module that is not yet imported, as it is once the user
        has named it.
    """
    if is_module_class(name) and name.partition(":")[0] not in sys.modules:
        raise UserError(
            f"{file} names the drafter {name!r}, and code that a file names is not imported: give "
            f"--drafter {name}:PATH if you trust it"
        )
    return drafter_class(name)


def is_baseline(name: str) -> bool:
    """Whether the name is that of a drafter without heads; imports those of other packages."""
    if name in DRAFTERS or name in BASELINES:
        return name in BASELINES
    foreign = is_module_class(name) or name in installed()
    return foreign and not drafter_class(name).trained


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
    """Build the drafter that `heads.drafter` names, for a backbone of the given shape; its layers are like Llama's.

    Raises:
      UserError: as for `whole_config`; an unknown LM-head kind, a rank larger than the LM head's,
        fields that the drafter refuses.
    """
    heads = whole_config(heads)
    kind = drafter_class(heads.drafter)
    between("heads.n_heads", heads.n_heads, 1, MOST_DEEP)
    between("heads.n_layers", heads.n_layers, kind.least_layers, MOST_DEEP)
    one_of("heads.lm_head", heads.lm_head, ("own", "shared", "low_rank"))
    between("heads.draft_vocab", heads.draft_vocab, 0, llama.vocab_size)
    outputs = heads.draft_vocab or llama.vocab_size
    if heads.lm_head == "low_rank":
        between("heads.rank", heads.rank, 1, min(llama.d_model, outputs))
    drafter = kind(heads, llama.llama_layers())
    drafter.check()
    between(f"the number of drafts of {drafter.name}", drafter.n_heads, 1, MOST_DEEP)
    return drafter


def no_drafter(llama: LlamaConfig) -> Drafter:
    """The drafter of plain decoding; equal for all models of one shape."""
    return NoDrafter(HeadsConfig(drafter="none"), llama)
