"""Constrained texts at random: valid, and those of plain decoding, drafted in a batch and served.

    CONSTRAINTS=2000 python -m pytest -m slow -s tests/constraints/test_schemas.py

prints the figures of as many schemas and of a quarter as many regular expressions.
"""

import os
import random
import re

import jax
import pytest
import tiny
from schemas import is_valid, random_regex, random_schema
from served import load_model

from medusa_jax import Options, Tree, UserError
from medusa_jax.constraints import constraint_of
from medusa_jax.serving import Request, Server

pytestmark = pytest.mark.usefixtures("x64")

PROMPTS = ["def parse(", "row = ", "{", "# a list of numbers\n", "class A:" * 9]
MANY = int(os.environ.get("CONSTRAINTS", "200"))
TREE = Tree.from_choices([[0], [1], [0, 0], [0, 0, 0], [-1], [-1, -1]])


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
    rng, ended, steps, tokens, refused = random.Random(len(constraints)), 0, 0, 0, 0
    made = [(given, usable(model, given)) for given in constraints]
    refused = sum(one is None for _, one in made)
    made = [pair for pair in made if pair[1]]
    with Server(
        model, slots=rows, trees={rows: TREE}, queue=2 * rows, chunk_steps=4
    ) as server:
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


def schemas_of(n):
    rng = random.Random(n)
    return [{"json_schema": random_schema(rng)} for _ in range(n)]


def matches(text, regex):
    return re.fullmatch(regex, text) is not None


def regexes_of(n):
    rng = random.Random(n)
    return [{"regex": random_regex(rng)} for _ in range(n)]


@pytest.mark.wide
def test_a_few(model):
    few = schemas_of(8)
    assert check(model, "schemas", few, is_valid, 8) > 0.7


@pytest.mark.slow
def test_many_schemas(model):
    assert check(model, "schemas", schemas_of(MANY), is_valid, 32) > 0.8


@pytest.mark.slow
def test_many_regular_expressions(model):
    assert check(model, "regular expressions", regexes_of(MANY // 4), matches, 32) > 0.9
