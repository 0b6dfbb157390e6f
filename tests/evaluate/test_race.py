"""Figures of a race, from runs made up here; repeated n-grams, against their definition."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_model

import medusa_jax
from medusa_jax import Tree
from medusa_jax.decoding.copies import REPEATS, copied_tokens
from medusa_jax.decoding.step import decode_step
from medusa_jax.evaluate import step_clock
from medusa_jax.evaluate.race import Contender, Run, figures, race
from medusa_jax.text.repetition import mean_repeated_ngram_share, repeated_ngram_share


def run(n_tokens, steps, seconds, prefill=0.1):
    """A text of this many tokens, by the device's count of what its steps appended."""
    return Run([[3] * n_tokens], prefill, seconds, steps=steps, appended=n_tokens - 1)


def test_a_token_that_no_step_made_shows_in_the_difference():
    own = [Run([[3] * 10], 0.1, 1.0, steps=4, appended=8)]
    assert figures(own, [run(9, 8, 1.0)])["difference"] == pytest.approx(1 / 8)


def test_a_contender_may_have_a_baseline_of_its_own():
    """The third is compared with the second; the median of three rounds counts."""
    entered = []
    for i, seconds in enumerate(([4.0] * 3, [2.0] * 3, [1.0] * 3, [99.0, 0.5, 0.25])):
        runs = (run(9, 8, s) for s in seconds)
        ask = lambda prompt, runs=runs: next(runs)  # noqa: E731
        entered.append(Contender("x", ask, against=i // 2 * 2))
    rows = race(entered, [[7]], 3, warm_up=False)
    assert [row["speedup"] for row in rows] == [1, 2, 1, 2]


def test_questions_have_speed_ups_of_their_own():
    """Twice, half and three times as fast; a text that ends with its first token has no time. Turns of a question are summed."""
    own = [run(9, 4, s) for s in (1.0, 4.0, 1.0)] + [run(1, 0, 0.0)]
    plain = [run(9, 8, s) for s in (2.0, 2.0, 3.0)] + [run(1, 0, 0.0)]
    found = figures(own, plain)
    assert (found["least_speedup"], found["median_speedup"]) == (0.5, 2.0)
    assert found["speedup"] == pytest.approx(7 / 6)
    found = figures(own, plain, [0, 0, 1, 2])
    assert (found["least_speedup"], found["median_speedup"]) == (4 / 5, (4 / 5 + 3) / 2)
    assert found["speedup"] == pytest.approx(7 / 6)


def test_texts_are_compared_with_the_baselines():
    own, plain = Run([[1, 2, 9, 4]], 0.1, 1.0), Run([[1, 2, 3, 4]], 0.1, 1.0)
    found = figures([own, plain], [plain, plain])
    assert (found["divergences"], found["texts"], found["agreement"]) == (1, 2, 0.75)
    # An engine that does not count steps has no figures of steps.
    assert found["mean_accepted_length"] is None and found["step_latency_ratio"] is None


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 5))
def test_repeated_share_is_what_it_says(tokens, n):
    seen, repeats, total = set(), 0, 0
    for i in range(len(tokens) - n + 1):
        gram = tuple(tokens[i : i + n])
        repeats += gram in seen
        seen.add(gram)
        total += 1
    assert repeated_ngram_share(tokens, n) == pytest.approx(repeats / total if total else 0)
    assert mean_repeated_ngram_share([[7] * 6, [1, 2, 3]]) == pytest.approx(1 / 3)
    assert mean_repeated_ngram_share([]) == 0.0


# Step latencies are of the steps they claim.


CONTEXT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path, max_position=CONTEXT)
    return medusa_jax.load(str(path), str(path / "heads"), tree="chain:1", dtype="float32")


def test_every_timed_run_makes_all_its_steps_in_one_size_of_cache(model, monkeypatch):
    """After a prompt that nearly fills the first cache, for narrow and wide trees alike."""
    runs = []
    run_steps = step_clock.run_steps

    def watched(engine, variables, state, n_steps):
        state = run_steps(engine, variables, state, n_steps)
        if n_steps:
            runs.append((state.cache.slots, np.asarray(state.steps_B).tolist()))
        return state

    monkeypatch.setattr(step_clock, "run_steps", watched)
    trees = [Tree.none(), Tree.cartesian([11]), Tree.cartesian([5, 4])]
    prompt = [4, 5, 6, 7] * 25
    assert len(prompt) + trees[-1].n_nodes <= 128  # a first step would fit the first cache
    engines = [model.engine(tree) for tree in trees]
    clock = step_clock.StepClock(engines, model.variables, prompt, batch=2, n_steps=8)
    seconds = [clock.seconds(engine) for engine in engines]
    assert len(runs) == len(trees) and all(s > 0 for s in seconds)
    assert {steps for _, made in runs for steps in made} == {8}
    assert len({slots for slots, _ in runs}) == 1


def test_the_text_repeats_itself_in_every_second_timed_step(model, monkeypatch):
    matches = []

    def watched(engine, variables, state):
        _, match_B = copied_tokens(state.text_BS, state.length_B, 1)
        jax.debug.callback(
            lambda n: matches.append(bool(n[0] >= REPEATS)), match_B, ordered=True
        )
        return decode_step(engine, variables, state)

    monkeypatch.setattr(step_clock, "decode_step", watched)
    tree = Tree.from_choices([[-1], [-1, -1]], [[0], [1]])
    engine = model.engine(tree)
    step_clock.StepClock([engine], model.variables, [4, 5], n_steps=4).seconds(engine)
    assert matches == [False, True, False, True]
