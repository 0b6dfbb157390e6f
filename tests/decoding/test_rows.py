"""Rows that wait while others step: their texts are those of one fixed batch."""

import family
import numpy as np
import pytest
from planted import decoded, planted, random_model, texts_of
from tiny import tiny_arch

from medusa_jax.decoding import generation, rows
from medusa_jax.decoding.loop import FOREVER, decode_loop
from medusa_jax.decoding.prefill import PromptPiece
from medusa_jax.decoding.request import DecodeRequest, row_options
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.stopping import LIMIT, PAUSED, RUNNING, STOPPED
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
CONFIG = tiny_arch(vocab_size=7, n_layers=1)


def test_rows_wait_for_their_turn_and_for_room():
    """The first fills the cache and is paused; nothing may be written over its last slots.

    One that has ended is never woken.
    """
    _, llama, backbone = random_model(CONFIG, 1)
    engine = Engine(llama, planted(CONFIG), Tree.none(), "sampled")
    variables = {"backbone": backbone, "heads": {}}
    request = DecodeRequest(
        [[1, 2, 3, 4, 5] * 24, [1, 2, 3]], [30, 20], temperature=[1.5, 1.5], seed=[1, 2]
    )
    whole = decoded(engine, variables, request)

    def run_only(state, *wanted):
        steps, few = np.int32(FOREVER), np.int32(0)
        return rows.run_only(engine, state.status_B, np.array(wanted, np.int32), steps, few)

    def go_on(state, *wanted):
        status_B, steps = run_only(state, *wanted)
        return decode_loop(engine, variables, state.replace(status_B=status_B), steps)

    state, [slots, more] = generation.begin(engine, variables, request)
    state, full = go_on(state, RUNNING, RUNNING)
    assert full.length_B.tolist() == [slots, 3 + slots - 120]
    state, still = go_on(state, PAUSED, RUNNING)
    assert still.steps_B.tolist() == full.steps_B.tolist()
    state, second = go_on(generation.grow(engine, more, state), PAUSED, RUNNING)
    assert second.steps_B.tolist() == [full.steps_B[0], whole.steps_B[1]]
    assert second.status_B.tolist() == [PAUSED, LIMIT]
    # One that has ended without the host's knowledge makes the next chunk short.
    assert int(run_only(state, RUNNING, RUNNING)[1]) == 0
    assert int(run_only(state, RUNNING, STOPPED)[1]) == FOREVER
    state, both = go_on(state, RUNNING, STOPPED)
    assert both.status_B.tolist() == [LIMIT, LIMIT]
    assert both.steps_B.tolist() == whole.steps_B.tolist()
    assert texts_of(both) == texts_of(whole)


def test_a_drafter_goes_on_from_where_texts_part():
    """What it keeps of a text is that of a row which read the whole prompt."""
    _, llama, backbone = random_model(CONFIG, 1)
    drafter, heads = family.baseline_of("draft_model", CONFIG)
    engine = Engine(llama, drafter, Tree.chain(2))
    variables = {"backbone": backbone, "heads": heads}
    options = row_options(DecodeRequest([[0]], [9]), CONFIG.vocab_size)
    state = rows.idle(engine, rows.Sizes(64, 1), 2, 32)

    def read(state, source, prompt, begin):
        row = rows.take_row(engine, state, np.int32(source))
        row = rows.begin_row(engine, row, options)
        return rows.read_row(engine, variables, row, PromptPiece.of(prompt, begin, 16))

    first, second = [1, 2, 3, 4, 5, 6, 1, 2], [1, 2, 3, 4, 1, 1]
    fresh = read(state, 0, second, 0)
    state = rows.insert_row(engine, state, read(state, 0, first, 0), np.int32(1))
    again = read(state, 1, second, 3)
    for row in (fresh, again):
        assert row.drafter.length_B.tolist() == [6]
    caches = (row.drafter.cache.layers[0] for row in (fresh, again))
    for ours, theirs in zip(*caches):
        np.testing.assert_allclose(ours[:, :, :6], theirs[:, :, :6], atol=1e-12)
    assert again.root_B.tolist() == fresh.root_B.tolist()
