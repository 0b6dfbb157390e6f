"""The fields of a body, each understood or refused by its name."""

import math
from typing import Any

from medusa_jax.errors import did_you_mean
from medusa_jax.serving.http.refused import Refused

# Fields that clients send and that change nothing here, and those that may only say "nothing".
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "modalities": (["text"],),
}


class Fields:
    """The fields of a body, each read once; `finish` refuses unread ones."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise Refused(400, "the body should be a JSON object")
        self.body = body
        self._read = set(IGNORED)

    def take(self, name: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        """The value of a field; null and absence are the default."""
        self._read.add(name)
        value = self.body.get(name)
        if value is None:
            return default
        wrong_bool = isinstance(value, bool) and bool not in kinds
        if wrong_bool or not isinstance(value, kinds):
            raise Refused(400, f"{name!r} should be {what}", name)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        return self.take(name, (bool,), "true or false", default)

    def number(self, name: str, default: Any, low: float, high: float = math.inf) -> Any:
        """A number from `low` to `high`."""
        value = self.take(name, (int, float), "a number", default)
        if value is not None and not low <= value <= high:
            most = f"from {low} to {high}" if high < math.inf else f"at least {low}"
            raise Refused(400, f"{name!r} should be {most}, not {value}", name)
        return value

    def whole(self, name: str, default: Any, low: float, high: float = math.inf) -> Any:
        """A whole number from `low` to `high`."""
        self.take(name, (int,), "a whole number", default)
        return self.number(name, default, low, high)

    def finish(self) -> None:
        """Refuse what is unknown, and what is known but cannot be done."""
        for name, value in self.body.items():
            if name in NEUTRAL:
                if value is not None and value not in NEUTRAL[name]:
                    raise Refused(400, f"{name!r} is not supported here", name)
            elif name not in self._read:
                near = did_you_mean(name, {*self._read, *NEUTRAL})
                raise Refused(400, f"unknown field {name!r}{near}", name, "unknown_field")
