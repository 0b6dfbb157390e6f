"""Bounds of a field's values, written beside its type: `steps: Annotated[int, AtLeast(1)] = 100`.

`typed.field_value` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AtLeast:
    """The lowest value of a number; without it 0."""

    value: float


@dataclass(frozen=True)
class AtMost:
    """The highest value of a number."""

    value: float


@dataclass(frozen=True)
class OneOf:
    """The names that a text may be.

    Attributes:
      aliases: names of other projects, and the names here; for messages.
    """

    names: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
