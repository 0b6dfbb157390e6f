"""Constrained texts at random: valid, and those of plain decoding, drafted in a batch and served.

    CONSTRAINTS=2000 python -m pytest -m slow -s tests/constraints/test_schemas.py

prints the figures of as many schemas and of a quarter as many regular expressions.
"""

import json
import os
import random
import re

import jax
import jsonschema
import pytest
import tiny
from served import load_model

from medusa_jax import Options, Tree, UserError
from medusa_jax.constraints import constraint_of
from medusa_jax.serving import Request, Server

pytestmark = pytest.mark.usefixtures("x64")

PROMPTS = ["def parse(", "row = ", "{", "# a list of numbers\n", "class A:" * 9]
MANY = int(os.environ.get("CONSTRAINTS", "200"))
TREE = Tree.from_choices([[0], [1], [0, 0], [0, 0, 0], [-1], [-1, -1]])


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
    """A list whose items refer to a schema in the root's `$defs`."""
    if depth == 0:  # below the root
        return _array(rng, depth)
    of = {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2}
    return of | {"$defs": {"one": random_schema(rng, 0)}}


@pytest.fixture(autouse=True)
def _loops_call_the_host(monkeypatch):
    """Where there is a compiler; in float64 the products are XLA's anyway."""
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "")


def is_valid(text, schema):
    """Whether a text is JSON that the schema allows."""
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


LEAVES = ["a", "b", "0", "xy", "-", r"\.", "[a-d]", "[^a-z ]", r"[0-9]", " "]


def random_regex(rng, depth=3):
    """A regular expression of Python and of llguidance, without an endless repetition."""
    if depth == 0:
        return rng.choice(LEAVES)
    inner = [random_regex(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    kind = rng.randrange(4)
    if kind == 0:
        return "(" + "|".join(inner) + ")"
    if kind == 1:
        return f"({inner[0]})" + rng.choice(["?", "{2}", "{1,3}", "{0,2}"])
    return "".join(inner)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny one in float64 whose vocabulary can write JSON."""
    path = tmp_path_factory.mktemp("constrained")
    tiny.write_model(path, characters=tiny.PRINTABLE + "\té", max_position=512)
    jax.config.update("jax_enable_x64", True)  # `x64` of a test comes too late
    return load_model(path, dtype="float64")


def options_of(rng, constraint):
    """Greedy or sampled, with penalties or without, of a limit of its own."""
    return Options(
        max_new_tokens=rng.choice([60, 150, 200]),
        temperature=rng.choice([0, 0.7, 1.3]),
        top_p=rng.choice([1, 0.9]),
        seed=rng.randrange(100),
        frequency_penalty=rng.choice([0, 0, 0.5]),
        repetition_penalty=rng.choice([1, 1, 1.2]),
        constraint=constraint,
    )


KINDS = {
    "json_schema": (random_schema, is_valid),
    "regex": (random_regex, lambda text, regex: re.fullmatch(regex, text) is not None),
}


def usable(model, given):
    """The constraint; None if it is refused, which is one sentence."""
    try:
        constraint = constraint_of(given)
        model._grammars.guide(constraint, model.eos_ids)
    except UserError as error:
        assert "\n" not in str(error)
        return None
    return constraint


def check(model, name, constraints, obeys, rows):
    """Batches of rows, of which every eighth has no constraint; returns the share that ended.

    Args:
      obeys: whether a text is allowed by the value of a constraint.
    """
    rng, ended, steps, tokens = random.Random(len(constraints)), 0, 0, 0
    made = [(given, usable(model, given)) for given in constraints]
    refused = sum(one is None for _, one in made)
    made = [pair for pair in made if pair[1]]
    with Server(model, slots=rows, trees={rows: TREE}, queue=2 * rows) as server:
        for start in range(0, len(made), rows):
            batch = made[start : start + rows]
            batch += [(None, None)] * (rows - len(batch))  # one size, one program
            batch += [(None, None)] * (rows // 8)
            options = [options_of(rng, one) for _, one in batch]
            prompts = [rng.choice(PROMPTS) for _ in batch]
            plain = model.generate(prompts, options, tree="none")
            drafted = model.generate(prompts, options, tree=TREE)
            asked = [Request(*pair, id=i) for i, pair in enumerate(zip(prompts, options))]
            handles = server.submit_all(asked)
            served = [[*handle][-1].ending.result for handle in handles]
            for (given, _), one, *others in zip(batch, plain, drafted, served):
                for other in others:
                    assert other.token_ids == one.token_ids, (given, one.text, other.text)
                    assert other.finish_reason == one.finish_reason
                if given is None:
                    continue
                steps, tokens = steps + others[0].steps, tokens + one.new_tokens - 1
                if one.finish_reason == "stop":
                    ended += 1
                    [value] = given.values()
                    assert obeys(one.text, value), (given, one.text)
    print(
        f"\n{name}: {len(constraints)}, refused {refused}, ended {ended}, all valid; texts of "
        f"drafts and of the server all those of plain decoding; {tokens / steps:.2f} tokens a step"
    )
    return ended / len(made)


@pytest.mark.parametrize(
    ("kind", "count", "rows", "least"),
    [
        pytest.param("json_schema", 8, 8, 0.7, marks=pytest.mark.wide),
        pytest.param("json_schema", MANY, 32, 0.8, marks=pytest.mark.slow),
        pytest.param("regex", MANY // 4, 32, 0.9, marks=pytest.mark.slow),
    ],
)
def test_texts_obey(kind, count, rows, least, model):
    """Every text obeys, and more than `least` of them end before their limit."""
    rng = random.Random(count)
    make, obeys = KINDS[kind]
    constraints = [{kind: make(rng)} for _ in range(count)]
    assert check(model, kind, constraints, obeys, rows) > least
