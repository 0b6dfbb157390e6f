"""Greedy text with bounded repetition: the bar, and that a bar of 1 is plain greedy decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import medusa_jax
from medusa_jax.demo.refine import completes_repeat
from medusa_jax.demo.varied import LEAST_LENGTH, completions, write_varied
from medusa_jax.tree import Tree

compiled = jax.jit(completions, static_argnums=2)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=24))
def test_completions_are_what_would_be_marked(tokens):
    padded = jnp.array([tokens + [1] * (32 - len(tokens))])
    got = np.asarray(compiled(padded, jnp.int32(len(tokens)), 3))[0]
    marked = [completes_repeat(np.array([*tokens, v]))[-1] for v in range(3)]
    assert got.tolist() == marked


@pytest.fixture(scope="module")
def demo():
    return medusa_jax.load(drafter="none")


def prompts_of(demo):
    return [demo.encode("import os\n\n\ndef main("), demo.encode("x = [1, 2, 3]\n")]


def test_without_a_bar_it_is_greedy_decoding(demo):
    prompts, options = prompts_of(demo), medusa_jax.api.Options(max_new_tokens=40)
    written = write_varied(demo, prompts, 40, 1.0, batch_size=2)
    for prompt, sample in zip(prompts, written, strict=True):
        plain = demo.generate([prompt], options, tree=Tree.none())[0]
        assert sample["token_ids"] == list(plain.token_ids) and sample["swapped"] == 0
        assert sample["prompt_ids"] == prompt


@pytest.mark.parametrize("allowed", [0.0, 0.2])
def test_the_bar_holds(demo, allowed):
    n = 80
    written = write_varied(demo, prompts_of(demo) * 2, n, allowed, batch_size=3)
    assert len(written) == 4
    for sample in written:
        ids = np.array(sample["token_ids"])
        repeats = completes_repeat(ids).sum()
        assert repeats <= allowed * max(len(ids), LEAST_LENGTH)
    assert sum(s["swapped"] for s in written) > 0
