"""Values from Python, NumPy and files, read as the types of fields and arguments."""

import functools
import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, NoReturn, ParamSpec, TypeVar

from medusa_jax.bounds import AtLeast, AtMost, OneOf
from medusa_jax.errors import UserError, between, did_you_mean, nearest, one_of

NUMBERS: dict[type, type] = {int: numbers.Integral, float: numbers.Real}
WRONG = (TypeError, ValueError, OverflowError)


def as_type(value: Any, kind: Any) -> Any:
    """A value as an annotated type, with Python's own numbers and tuples for sequences.

    A string is read as a tuple of one, a mapping as its pairs; keys that are numbers may be strings, as in JSON.

    Raises:
      TypeError, ValueError, OverflowError: it has another type.
    """
    if type(value) is kind:
        return value
    if typing.get_origin(kind) is typing.Annotated:
        return as_type(value, kind.__origin__)
    parts, kind = typing.get_args(kind), typing.get_origin(kind) or kind
    if kind is types.UnionType:
        for one in parts:
            with suppress(*WRONG):
                return as_type(value, one)
        raise TypeError
    if kind in (tuple, Sequence, Mapping):
        if isinstance(value, bytes) or isinstance(value, Mapping) != (kind is Mapping):
            raise TypeError
        if kind is Mapping:
            pairs = value.items()
            value = sorted((_key(k), v) for k, v in pairs)
        found = (value,) if isinstance(value, str) else tuple(value)
        one = tuple[parts] if kind is Mapping else parts[0]  # type: ignore[valid-type]
        fixed = kind is tuple and ... not in parts
        of = parts if fixed else [one] * len(found)
        return tuple(as_type(part, one) for part, one in zip(found, of, strict=True))
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if kind is Any:
        return value
    kinds = NUMBERS.get(kind, kind)
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, kinds):
        raise TypeError
    return kind(value) if kind in NUMBERS else value


def _key(key: Any) -> Any:
    """A mapping's key; one of JSON is a number's digits. `int` also reads "1_0"."""
    is_number = isinstance(key, str) and re.fullmatch(r"\s*[-+]?\d+\s*", key, re.ASCII)
    return int(key) if is_number else key


def read(name: str, value: Any, kind: Any) -> Any:
    """`as_type` of a field or argument.

    Raises:
      UserError: it has another type; names it.
    """
    try:
        return as_type(value, kind)
    except WRONG:
        wanted = re.sub(r"(\w+\.)+(?=\w)", "", inspect.formatannotation(kind))
        raise UserError(f"{name} should be {wanted}, not {repr(value)[:80]}") from None


def read_fields(
    owner: Any, limits: Mapping[str, tuple[Callable[[Any], bool], str]]
) -> None:
    """Give fields of a frozen dataclass the types of their annotations.

    Args:
      limits: by field, a test of its value, and the description of allowed values.

    Raises:
      UserError: another type, or the test fails; names the field.
    """
    kinds = {field.name: field.type for field in fields(owner)}
    for name, (holds, what) in limits.items():
        argument = getattr(owner, name)
        try:
            value = as_type(argument, kinds[name])
            if not holds(value):
                raise ValueError
        except WRONG:
            shown = repr(argument)[:80]
            raise UserError(f"{name} must be {what}, not {shown}") from None
        object.__setattr__(owner, name, value)


Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def checked_arguments(
    options: Sequence[str] = (), types: bool = True
) -> Callable[[Callable[Arguments, Returned]], Callable[Arguments, Returned]]:
    """Decorator: reads arguments as their annotated types (`read`).

    An unknown keyword is a `UserError` that names the nearest one.

    Args:
      options: names that belong into the function's `Options`.
      types: False leaves the arguments as they are. So does an annotation in quotes.
    """

    def decorate(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        names = [*inspect.signature(function).parameters]
        kinds = function.__annotations__ if types else {}
        kinds = {n: kind for n, kind in kinds.items() if not isinstance(kind, str)}
        who = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
            for name in kwargs.keys() - {*names}:
                near, option = did_you_mean(name, names), nearest(name, options)
                if option and (name == option or not near):
                    near = f": give Options({option}=...)"
                raise UserError(f"{who} has no argument {name!r}{near}")
            values = [read(n, x, kinds.get(n, Any)) for n, x in zip(names, args)]
            values += args[len(names) :]  # too many: Python's own error
            named = {n: read(n, x, kinds.get(n, Any)) for n, x in kwargs.items()}
            return function(*values, **named)  # type: ignore[arg-type]

        return call

    return decorate


# Highest values of numbers without `AtMost`.
HIGHEST: dict[Any, float] = {int: 2**31 - 1, float: 1e30}


def field_value(owner: object, name: str, value: Any, path: str) -> Any:
    """A value for a field of a dataclass, as its type, within the bounds beside it (`bounds.py`).

    Numbers are at least 0 unless the field says otherwise.

    Args:
      path: the field's name for messages.

    Raises:
      UserError: another type, or outside the bounds; names field and value.
    """
    hint = typing.get_type_hints(type(owner), include_extras=True)[name]
    kind, bounds = hint, getattr(hint, "__metadata__", ())
    if bounds:
        kind = hint.__origin__
    value = read(path, value, kind)
    lowest: float = 0
    highest = HIGHEST.get(kind)
    for bound in bounds:
        if isinstance(bound, OneOf):
            one_of(path, value, bound.names, bound.aliases)
        elif isinstance(bound, AtLeast):
            lowest = bound.value
        elif isinstance(bound, AtMost):
            highest = bound.value
    if highest is not None:
        between(path, value, lowest, highest)
    return value


@dataclass(frozen=True)
class Fields:
    """The fields of a file. Each getter returns `default` where the file lacks the field.

    Raises:
      UserError: no such field and no default, or a value of another type; names file and field.
    """

    file: str
    values: dict[str, Any]

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number that can be an array size."""
        value: int = self._read(name, default, int)
        between(f"{self.file}: {name}", value, least, 2**31 - 1)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value: float = self._read(name, default, float)
        if not 0 < value < math.inf:
            self.refuse(name, "a number above 0")
        return value

    def switch(self, name: str, default: bool = False) -> bool:
        """True or false."""
        return bool(self._read(name, default, bool))

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        return str(self._read(name, default, str))

    def table(self, name: str) -> dict[str, Any]:
        """An object; an empty one if there is none."""
        value: dict[str, Any] = read(
            f"{self.file}: {name}", self.values.get(name) or {}, dict
        )
        return value

    def items(self, name: str, kind: type, default: list | None = None) -> list:
        """A list of values of one type."""
        value: list = self._read(name, default, list)
        if any(type(item) is not kind for item in value):
            self.refuse(name, f"a list of {kind.__name__}")
        return value

    def expect(self, able: Mapping[str, tuple]) -> None:
        """Refuse a field whose value is not supported; absent and null fields pass.

        Args:
          able: the supported values of each field; any other would change the computation.
        """
        for name, values in able.items():
            if (value := self.values.get(name)) not in (None, *values):
                # 0 and 0.0 are one; tables have no hashes.
                known = [repr(x) for i, x in enumerate(values) if x not in values[:i]]
                raise UserError(
                    f"{self.file}: {name} {value!r} is not supported (only {', '.join(known)})"
                )

    def refuse(self, name: str, kind: str) -> NoReturn:
        """Raise the UserError for a field that is not of this kind."""
        raise UserError(
            f"{self.file}: {name} should be {kind}, not {self.values.get(name)!r:.80}"
        )

    def _read(self, name: str, default: Any, kind: type) -> Any:
        value = self.values.get(name, default)
        if value is None:
            raise UserError(f"{self.file} does not say {name}")
        return read(f"{self.file}: {name}", value, kind)
