"""Typed access to the fields of a file's description: config.json, the metadata of a GGUF file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from medusa_jax.errors import UserError
from medusa_jax.whole_files import Json


@dataclass(frozen=True)
class Fields:
    """The fields of a file. Each getter returns `default` where the file lacks the field.

    Raises:
      UserError: no such field and no default, or a value of another type; names file and field.
    """

    file: str
    values: Json

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number that can be an array size."""
        value = self._get(name, default)
        if type(value) is not int or not least <= value < 2**31:
            self.refuse(name, f"a whole number from {least} on")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            self.refuse(name, "a number above 0")
        return float(value)

    def switch(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._get(name, default)
        if type(value) is not bool:
            self.refuse(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            self.refuse(name, "text")
        return value

    def table(self, name: str) -> Json:
        """An object; an empty one if there is none."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return value

    def items(self, name: str, kind: type, default: list | None = None) -> list:
        """A list of values of one type."""
        value = self._get(name, default)
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            self.refuse(name, f"a list of {kind.__name__}")
        return value

    def expect(self, able: Mapping[str, tuple]) -> None:
        """Refuse a field whose value is not supported; absent and null fields pass.

        Args:
          able: the supported values of each field; any other would change the computation.
        """
        for name, values in able.items():
            if (value := self.values.get(name)) not in (None, *values):
                raise UserError(
                    f"{self.file}: {name} {value!r} is not supported (only {values[0]!r})"
                )

    def refuse(self, name: str, kind: str) -> NoReturn:
        """Raise the UserError for a field that is not of this kind."""
        raise UserError(
            f"{self.file}: {name} should be {kind}, not {self.values.get(name)!r:.80}"
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name, default)
        if value is None:
            raise UserError(f"{self.file} does not say {name}")
        return value
