"""JSON schemas for llguidance: annotations are dropped, and keywords that it misreads are rewritten or refused."""

import re
from typing import Any

from medusa_jax.errors import UserError

# The formats that llguidance knows; any other one is an annotation.
FORMATS = (
    *("date-time", "time", "date", "duration", "email"),
    *("hostname", "ipv4", "ipv6", "uuid", "uri"),
)
# Keywords whose values are data, and those whose values are schemas by names of the user's.
DATA = ("const", "enum", "default", "example", "examples", "required")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Keywords whose numbers lose digits, or their meaning, beyond 64 bits.
NUMBERS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const"),
    "enum",
)
LEAST, LARGEST = -(2**63), 2**63 - 1
# Keywords with whole numbers of characters, items or properties; llguidance reads no more than 32 bits of some.
MOST_OF = ("maxLength", "maxItems", "maxProperties")
LEAST_OF = ("minLength", "minItems", "minProperties")
LONGEST = 2**31
# A part of a regular expression: an escaped character, a set, or any other character.
PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^][\\])*\]|.", re.DOTALL)


def served_schema(schema: Any) -> Any:
    """Return an equivalent schema without the annotations that llguidance refuses.

    Raises:
      UserError: a number that is too large, a length that no answer has, or a `oneOf` whose schemas may overlap.
    """
    if schema is True:
        return {}
    if schema is False:
        raise UserError("json_schema: false allows nothing")
    return _served(schema, schema)


def _served(schema: Any, root: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for name, value in schema.items():
        if value is None and name != "const":
            continue  # as if it were absent
        if name in NUMBERS and not _fits(value):
            raise UserError(f"json_schema: {name!r} has a number beyond 2^63")
        if name in (*MOST_OF, *LEAST_OF) and isinstance(value, int | float):
            if value >= LONGEST and name in MOST_OF:
                continue  # no answer is that long
            if value >= LONGEST:
                raise UserError(f"json_schema: no answer is as long as {name!r} asks for")
            out[name] = int(value) if value == int(value) else value
            continue
        skip = name == "format" and isinstance(value, str) and value not in FORMATS
        if skip or (name == "uniqueItems" and value is False):
            continue
        if name in DATA:
            out[name] = value
        elif name == "pattern" and isinstance(value, str):
            out[name] = without_null(value)
        elif name == "patternProperties" and isinstance(value, dict):
            out[name] = {
                without_null(k): _served(inner, root) for k, inner in value.items()
            }
        elif name in NAMED and isinstance(value, dict):
            out[name] = {key: _served(inner, root) for key, inner in value.items()}
        elif isinstance(value, list):
            out[name] = [_served(inner, root) for inner in value]
        else:
            out[name] = _served(value, root)
    if isinstance(schema.get("oneOf"), list) and (apart := _told_apart(schema, root)):
        alternatives = out.pop("oneOf")
        optional = [inner for inner in alternatives if not _requires(inner, apart, root)]
        if len(optional) > 1:  # a text without the property would be several of them
            for inner in optional:
                inner["required"] = [*inner.get("required", ()), apart]
        any_of = {"anyOf": alternatives}
        out |= {"allOf": [*out.get("allOf", ()), any_of]} if "anyOf" in out else any_of
    return out


def _requires(schema: Any, name: str, root: Any) -> bool:
    fields = schema.get("required"), _resolved(schema, root).get("required")
    return any(name in names for names in fields if names)


def _fits(value: Any) -> bool:
    """Whether all numbers in some data are within 64 bits; NaN is not."""
    if isinstance(value, dict | list):
        return all(map(_fits, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int | float) or LEAST <= value <= LARGEST


def _told_apart(schema: dict[str, Any], root: Any) -> str:
    """Return the property whose constants tell the objects of a `oneOf` apart, or ""."""
    objects = [_resolved(option, root) for option in schema["oneOf"]]
    if any("object" not in (option.get("type"), schema.get("type")) for option in objects):
        return ""
    values = [dict(option.get("properties") or {}) for option in objects]
    for name in values[0] if values else ():
        constants = [_constants(option.get(name), root) for option in values]
        all_values = [value for group in constants for value in group]
        if all(constants) and len(all_values) == len(set(all_values)):
            return name
    return ""


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """Return a schema, or the one within `root` that it refers to."""
    for _ in range(9):
        reference = schema.get("$ref", "") if isinstance(schema, dict) else ""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for step in reference[2:].split("/"):
            schema = schema.get(step) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}


def _constants(schema: Any, root: Any) -> set[tuple[bool, Any]]:
    """Return the values of a schema that allows nothing else; otherwise none."""
    schema = _resolved(schema, root)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(v, dict | list) for v in values):
        return set()
    return {(type(v) in (int, float), v) for v in values}  # 1 is 1.0, and not true


def without_null(pattern: str) -> str:
    """Take the null character out of every set.

    In llguidance 1.9 a set that contains it also matches escaped quotes and backslashes: `[^"]*` matches `a\\"b`.

    Example: `[^"]+` becomes `[[^"]--\\x00]+`.
    """

    def replaced(part: re.Match[str]) -> str:
        is_set = len(part[0]) > 2 and part[0].startswith("[")
        return rf"[{part[0]}--\x00]" if is_set else part[0]

    return PART.sub(replaced, pattern)
