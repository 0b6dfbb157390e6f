"""Lookahead outside the package: window and pool against plain Python, and its trees.

That its text is plain decoding's is tested along with all other drafters' (heads/test_contract.py).
"""

import family
import jax
import numpy as np
import pytest
from planted import texts_of
from tiny import decoder, forward_logits, random_params, tiny_arch

from medusa_jax.decoding import generation
from medusa_jax.decoding.loop import decode_loop
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.state import Engine, progress_of
from medusa_jax.errors import UserError
from medusa_jax.model.backbone import Backbone
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
NAME = "examples.lookahead:Lookahead"
CONFIG = tiny_arch(vocab_size=7)


def model(seed=1):
    params = random_params(CONFIG, seed)
    return (params, *decoder(CONFIG, params))


class ByHand:
    """Window and pool of one row in plain Python; the model is asked by whole texts."""

    def __init__(self, config, params, window, W, N, G):
        self.config, self.params, self.W, self.N, self.G = config, params, W, N, G
        self.pool = {}
        self.levels, rest = [list(window[: W - 1])], list(window[W - 1 :])
        while rest:
            self.levels.append(rest[:W])
            rest = rest[W:]

    def step(self, text):
        """`text` ends with the root."""
        columns = [[level[i] for level in self.levels[1:]] for i in range(self.W)]
        for i, column in enumerate(columns):
            read = [*text, *self.levels[0][:i], *column]
            column.append(int(forward_logits(self.config, self.params, read)[-1].argmax()))
        for i, column in enumerate(columns):
            key = text[-1] if i == 0 else self.levels[0][i - 1]
            known = self.pool.setdefault(key, [])
            if tuple(column) in known:
                known.remove(tuple(column))
            known.insert(0, tuple(column))
            del known[self.G :]
        below = [list(level) for level in zip(*columns)]
        self.levels = [below[0][1:], *below[1:]]


def pool_of(pool_VGY):
    found = {
        key: [tuple(gram) for gram in grams.tolist() if gram[0] >= 0]
        for key, grams in enumerate(np.asarray(pool_VGY))
    }
    return {key: grams for key, grams in found.items() if grams}


def test_window_and_pool_are_those_of_plain_python_step_by_step():
    params, llama, backbone = model()
    drafter, _ = family.baseline_of(NAME, CONFIG)
    W, N, G = 4, 4, 3
    engine = Engine(llama, drafter, drafter.default_tree)
    request = DecodeRequest([[1, 2, 3, 1, 2], [5]], [60, 60])
    variables = {"backbone": backbone, "heads": {}}
    state, _ = generation.begin(engine, variables, request)
    start = np.asarray(state.drafter.window_BX)
    rows = [ByHand(CONFIG, params, start[b].tolist(), W, N, G) for b in range(2)]
    for _ in range(7):
        new = texts_of(progress_of(state))
        texts = [[*prompt, *text] for prompt, text in zip(request.prompts, new)]
        state, _ = decode_loop(engine, variables, state, np.int32(1))
        for b, row in enumerate(rows):
            row.step(texts[b])
            flat = [token for level in row.levels for token in level]
            assert state.drafter.window_BX[b].tolist() == flat
            assert pool_of(state.drafter.pool_BVGY[b]) == row.pool
    assert max(len(grams) for row in rows for grams in row.pool.values()) == G


def test_guesses_are_branches_and_nothing_else():
    drafter, _ = family.baseline_of(NAME, CONFIG)
    drafter.check_tree(drafter.default_tree)
    for tree in (Tree.cartesian([2, 2]), Tree.cartesian([4])):
        with pytest.raises(UserError, match="at most 3 chains side by side"):
            drafter.check_tree(tree)
    # Copied tokens come in addition, at any depth.
    drafter.check_tree(Tree.from_choices([[0], [1], [1, 0], [-1], [-1, -1]]))


def test_the_first_guess_has_all_the_mass_at_any_temperature():
    """Rejection sampling tests guesses in order, as if they had been drawn one after the other."""
    _, llama, backbone = model()
    drafter, _ = family.baseline_of(NAME, CONFIG)
    state = drafter.start(1, 8, np.float64)
    state = state.replace(
        pool_BVGY=state.pool_BVGY.at[0, 2].set(np.int32([[5] * 3, [1] * 3, [6] * 3]))
    )
    tree = Tree.cartesian([3])
    propose = family.proposed_logits(drafter, Backbone(llama, backbone), tree)
    nodes, logits = propose({}, state, np.array([2], np.int32))
    assert nodes.tolist() == [[2, 5, 1, 6]]
    for temperature in (1e-3, 1e6):
        mass_V = jax.nn.softmax(logits[0][0, 0] / temperature)
        assert mass_V[5] == 1
