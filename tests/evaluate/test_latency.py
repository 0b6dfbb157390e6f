"""Step latencies are of the steps they claim."""

import numpy as np
import pytest
from tiny import write_model

import medusa_jax
from medusa_jax import Tree, UserError
from medusa_jax.decoding import timing
from medusa_jax.evaluate.race import step_seconds

CONTEXT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path, max_position=CONTEXT)
    return medusa_jax.load(str(path), str(path / "heads"), tree="chain:1", dtype="float32")


def test_every_timed_run_makes_all_its_steps_in_one_size_of_cache(model, monkeypatch):
    """Behind a prompt that nearly fills the first cache, for narrow and wide trees alike."""
    runs = []
    decode_loop = timing.decode_loop

    def watched(engine, variables, state, max_steps):
        slots = state.cache.slots
        state, progress = decode_loop(engine, variables, state, max_steps)
        if max_steps:
            runs.append((slots, np.asarray(progress.steps_B).tolist()))
        return state, progress

    monkeypatch.setattr(timing, "decode_loop", watched)
    trees = [Tree.none(), Tree.cartesian([11]), Tree.cartesian([5, 4])]
    prompt = [4, 5, 6, 7] * 25
    assert len(prompt) + trees[-1].n_nodes <= 128  # a first step would fit the first cache
    seconds = step_seconds(model, trees, prompt, batch=2, n_steps=8, rounds=1)
    assert len(runs) == 2 * len(trees) and all(s > 0 for s in seconds)
    assert {steps for _, made in runs for steps in made} == {8}
    assert len({slots for slots, _ in runs}) == 1


def test_a_prompt_that_fills_the_context_is_refused(model):
    with pytest.raises(UserError, match=r"no room for a step of up to 2 tokens"):
        step_seconds(model, [Tree.chain(1)], [4] * (CONTEXT - 2))
