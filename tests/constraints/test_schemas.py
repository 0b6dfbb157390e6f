"""Answers of the demo to schemas at random: valid, and those of plain constrained decoding."""

import os
import random

import pytest
from schemas import is_valid, random_schema

import medusa_jax
from medusa_jax import Options

PROMPTS = ["def parse(", "import json\n\nrow = ", "{", "# a list of numbers\n", "class A:"]
MANY = int(os.environ.get("SCHEMAS", "2000"))


@pytest.fixture(scope="module")
def demo():
    return medusa_jax.load(tree="chain:3")


def check(demo, n, rows, plain_every):
    """Rows of all temperatures in ragged batches; returns how many ended by themselves."""
    rng, ended, checked = random.Random(n), 0, 0
    for start in range(0, n, rows):
        schemas = [random_schema(rng) for _ in range(rows)]
        options = [
            Options(
                max_new_tokens=150,
                temperature=rng.choice([0, 0.7, 1.3]),
                top_p=rng.choice([1, 0.9]),
                seed=start,
                frequency_penalty=rng.choice([0, 0, 0.5]),
                constraint={"json_schema": schema},
            )
            for schema in schemas
        ]
        prompts = [rng.choice(PROMPTS) for _ in schemas]
        results = demo.generate(prompts, options)
        for schema, result in zip(schemas, results):
            assert result.finish_reason in ("stop", "length"), (schema, result.text)
            if result.finish_reason == "stop":
                ended += 1
                assert is_valid(result.text, schema), (schema, result.text)
        if start // rows % plain_every == 0:
            plain = demo.generate(prompts, options, tree="none")
            assert [r.token_ids for r in results] == [r.token_ids for r in plain]
            checked += rows
    print(f"\n{start + rows} schemas: {ended} answers ended, all valid; {checked} compared")
    return ended


def test_a_few_schemas(demo):
    assert check(demo, 16, 8, 2) >= 12


@pytest.mark.slow
def test_many_schemas(demo):
    assert check(demo, MANY, 8, 1) > 0.8 * MANY
