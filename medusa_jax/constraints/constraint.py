"""The constraints that a request may have: JSON, a schema, a regular expression, choices, a grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_jax.constraints.schemas import served_schema
from medusa_jax.errors import UserError, one_of

# The value of a constraint, by kind.
KINDS = {
    "json_object": "true",
    "json_schema": "a JSON schema",
    "regex": "a regular expression",
    "choice": "a list of at least one string, none empty",
    "grammar": "a grammar in Lark's notation, or in GBNF",
}
# Most characters of a constraint; larger ones take too long to be read.
MOST_CHARACTERS = 1 << 18


@dataclass(frozen=True)
class Constraint:
    """One constraint; made by `constraint_of`.

    Attributes:
      kind: one of `KINDS`, or "tools": a server's own grammar in Lark's notation.
      text: JSON of a schema or of choices, else the expression or grammar itself.
    """

    kind: str
    text: str


def constraint_of(asked: Any) -> Constraint:
    """Return the constraint of {kind: value}.

    Example: {"choice": ["yes", "no"]}.

    Raises:
      UserError: another kind, a value of another form, or a schema that cannot be served.
    """
    if isinstance(asked, Constraint):
        return asked
    if not isinstance(asked, Mapping) or len(asked) != 1:
        raise UserError(
            f"a constraint is one of {', '.join(KINDS)} with its value, such as "
            f'{{"choice": ["yes", "no"]}}, not {_shown(asked)}'
        )
    [(kind, value)] = asked.items()
    one_of("a constraint", kind, KINDS)
    text = _text(kind, value)
    if text is None:
        raise UserError(f"{kind} should be {KINDS[kind]}, not {_shown(value)}")
    if kind == "grammar" and text.lstrip().startswith("{"):
        raise UserError(f"grammar should be {KINDS[kind]}: give a schema as json_schema")
    if len(text) > MOST_CHARACTERS:
        raise UserError(
            f"{kind} has {len(text)} characters, more than {MOST_CHARACTERS}: shorten it"
        )
    return Constraint(kind, text)


def _text(kind: str, value: Any) -> str | None:
    """Return a constraint's value as text; None if it has another form."""
    if kind == "json_object":
        return "" if value is True else None
    if isinstance(value, str) and kind in ("json_schema", "grammar"):
        value = value.removeprefix("\ufeff")  # a byte order mark
    if kind in ("regex", "grammar"):
        return value if isinstance(value, str) and value else None
    if kind == "choice":
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or not value or any(not isinstance(c, str) or not c for c in value):
            return None
        return json.dumps(list(value))
    if kind == "json_schema" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, Mapping | bool):
        return None
    try:
        return json.dumps(served_schema(value))
    except (TypeError, ValueError, RecursionError):
        return None


def _shown(value: Any) -> str:
    """Return the beginning of a value, in one line."""
    try:
        return repr(value)[:80]
    except RecursionError:
        return "one of that many levels"
