"""Random JSON schemas and regular expressions with short texts, so that answers finish."""

import json

WORDS = ["name", "age", "kind", "a b", "é", 'q"', "x", "items"]
PATTERNS = ["^[a-c]{2,4}$", "^(yes|no)$", "^[0-9]{3}-[a-z]+$", "^$|^z"]


def random_schema(rng, depth=2):
    """A schema of at most this many levels; `rng` is a `random.Random`."""
    leaves = [
        lambda: {"type": "string", "maxLength": rng.randint(0, 6)},
        lambda: {"type": "string", "minLength": 2, "maxLength": 5},
        lambda: {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 9},
        lambda: _bounded("integer", rng),
        lambda: _bounded("number", rng),
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"enum": rng.sample(["on", "off", 3, -1.5, None, True, ["a"]], 3)},
        lambda: {"const": rng.choice(["fixed", 7, False, {"k": [1, 2]}])},
        lambda: {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    ]
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(leaves)()
    deeper = [_object, _array, _choice, _shared]
    return rng.choice(deeper)(rng, depth - 1)


def _bounded(kind, rng):
    low = rng.randint(-200, 200)
    bounds = {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 300)}
    if kind == "number":
        bounds["multipleOf"] = 0.25
    return bounds


def _object(rng, depth):
    names = rng.sample(WORDS, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng, depth):
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _choice(rng, depth):
    return {"anyOf": [random_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def _shared(rng, depth):
    of = {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2}
    return (
        {**of, "$defs": {"one": random_schema(rng, 0)}}
        if depth == 1
        else of["items"] and _array(rng, depth)
    )


def is_valid(text, schema):
    """Whether a text is JSON that the schema allows."""
    import jsonschema

    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def random_regex(rng, depth=3):
    """A regular expression of Python and of llguidance, without an endless repetition."""
    if depth == 0:
        return rng.choice(
            ["a", "b", "0", "xy", "-", r"\.", "[a-d]", "[^a-z ]", r"[0-9]", " "]
        )
    inner = [random_regex(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    kind = rng.randrange(4)
    if kind == 0:
        return "(" + "|".join(inner) + ")"
    if kind == 1:
        return f"({inner[0]})" + rng.choice(["?", "{2}", "{1,3}", "{0,2}"])
    return "".join(inner)
