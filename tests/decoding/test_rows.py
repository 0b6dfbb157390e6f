"""Rows that wait while others step: their texts are those of one fixed batch."""

import numpy as np
import pytest
from planted import decoder, planted, random_params, texts_of, tiny_config

from medusa_jax.decoding import generate as loop
from medusa_jax.decoding import rows
from medusa_jax.decoding.stopping import LIMIT, PAUSED, RUNNING
from medusa_jax.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")


def test_rows_wait_for_their_turn_and_for_room():
    """The first fills the cache and is paused; nothing may be written over its last slots.

    One that has ended is never woken.
    """
    config = tiny_config(vocab_size=7, n_layers=1)
    llama, backbone = decoder(config, random_params(config, 1))
    engine = loop.Engine(llama, planted(config), Tree.none(), "sampled")
    variables = {"backbone": backbone, "heads": {}}
    request = loop.Request(
        [[1, 2, 3, 4, 5] * 24, [1, 2, 3]], [30, 20], temperature=[1.5, 1.5], seed=[1, 2]
    )
    whole = loop.generate(engine, variables, request)

    def go_on(state, *wanted):
        status_B = rows.run_only(engine, state.status_B, np.array(wanted, np.int32))
        state = state.replace(status_B=status_B)
        return loop.decode_loop(engine, variables, state, np.int32(loop.FOREVER))

    state, [slots, more] = loop.begin(engine, variables, request)
    state, full = go_on(state, RUNNING, RUNNING)
    assert full.length_B.tolist() == [slots, 3 + slots - 120]
    state, still = go_on(state, PAUSED, RUNNING)
    assert still.steps_B.tolist() == full.steps_B.tolist()
    state, second = go_on(loop.grow(engine, more, state), PAUSED, RUNNING)
    assert second.steps_B.tolist() == [full.steps_B[0], whole.steps_B[1]]
    assert second.status_B.tolist() == [PAUSED, LIMIT]
    state, both = go_on(state, RUNNING, RUNNING)
    assert both.status_B.tolist() == [LIMIT, LIMIT]
    assert both.steps_B.tolist() == whole.steps_B.tolist()
    assert texts_of(both) == texts_of(whole)
