"""Copied nodes: what they hold, that drafted text stays plain text, and that they are accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import drafted, plain_texts, planted, random_model
from tiny import tiny_arch

from medusa_jax.decoding.copies import NGRAM, copied_tokens, fill_with_copies
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.state import Engine
from medusa_jax.evaluate.ranks import copied_lengths
from medusa_jax.heads.drafter import Proposal
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
CONFIG = tiny_arch(vocab_size=7, n_layers=1)

# As deep as the heads' part, and deeper.
TREE = Tree.from_choices([[0], [1], [0, 0], [-1], [-1, -1], [-1, -1, -1]])
SPARED = Tree.from_choices(TREE.choices, [[2], [0, 1], [3]])


def copied(text, n):
    """What follows the end of a text, by the definition."""
    for length in range(NGRAM, 0, -1):
        for begin in range(len(text) - 1, length - 1, -1):
            if len(text) > length and text[begin - length : begin] == text[-length:]:
                period = len(text) - begin
                return [text[begin + i % period] for i in range(n)]
    return [text[-1]] * n


def occurs(text, n):
    """Whether the last n tokens of a text occurred earlier."""
    earlier = (text[i : i + n] for i in range(len(text) - n))
    return n < len(text) and text[-n:] in list(earlier)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(0, 3))
def test_what_followed_the_latest_longest_match_is_copied(text, after):
    padded = np.full((1, 24), 9)
    padded[0, : len(text) + after] = [*text, *[text[0]] * after]
    got = jax.jit(copied_tokens, static_argnums=2)(padded, np.array([len(text) - 1]), 4)
    assert got[0][0].tolist() == copied(text, 4)
    matches = [k for k in range(1, NGRAM + 1) if occurs(text, k)]
    assert got[1].tolist() == [max(matches, default=0)]


@pytest.mark.parametrize(
    ("text", "predicted", "expected"),
    [
        ([5, 1, 2], [7, 1, 2, 3, 4, 6, 0], [3, 4, 6]),  # longer than in the text
        ([1, 2, 5, 5, 1, 2], [1, 2, 3, 4, 6], [3, 4, 6]),  # as long: preferred
        ([0, 1, 2, 5, 5, 0, 1, 2], [1, 2, 3, 4, 6], [5, 5, 0]),  # shorter
        ([1, 2, 5, 5, 1, 2], [6, 6], [5, 5, 1]),
        ([0, 1, 2], [1, 2, 3], [3, 2, 2]),  # then the root
        ([0, 1, 2], [], [2, 2, 2]),
    ],
)
def test_what_follows_in_predicted_tokens_is_copied(text, predicted, expected):
    padded, own = np.full((1, 9), 9), np.full((1, 12), -1)
    padded[0, : len(text)], own[0, : len(predicted)] = text, predicted
    got, _ = copied_tokens(jnp.array(padded), jnp.array([len(text) - 1]), 3, jnp.array(own))
    assert got[0].tolist() == expected


@pytest.mark.parametrize(
    "texts, running, repeats",
    [
        ([[5, 6, 7, 5, 6]], [True], True),  # 5 6 occurred
        ([[5, 6, 7, 8, 6]], [True], False),  # 6 alone did
        ([[5, 6, 7, 5, 6], [5, 6, 7, 8, 9]], [True, True], True),  # half of the rows
        ([[5, 6, 7, 5, 6], [5, 6, 7, 8, 9]], [False, True], False),  # of those that run
    ],
)
def test_spares_are_used_where_the_text_does_not_repeat(texts, running, repeats):
    tree = Tree.from_choices([[0], [-1], [-1, -1]], [[0], [1], [0, 2], [1, 1]])
    assert tree.spares == ((1,), (0, 2)) and tree.depth == 2 and tree.max_rank == 2
    assert tree.drafted == Tree.from_choices([[0], [1], [0, 2]])
    assert tree.n_nodes == tree.drafted.n_nodes == 4
    ran = []

    def propose(tree):
        jax.debug.callback(lambda: ran.append(tree))
        nodes_BM = jnp.tile(jnp.array([6, 1, 2, 3])[: tree.n_nodes], (len(texts), 1))
        return Proposal(nodes_BM)

    arguments = map(np.array, (texts, [4] * len(texts), running))
    run = jax.jit(fill_with_copies, static_argnums=(0, 1))
    (nodes_BM, _), filled = run(tree, propose, *arguments)
    jax.effects_barrier()
    # No spares are drafted where the chain is copied.
    assert ran == [Tree.from_choices([[0]]) if repeats else tree.drafted]
    chosen = tree if repeats else tree.drafted
    for name in ("parent_M", "depth_M", "mask_MM", "ancestors_ML"):
        assert getattr(filled, name).tolist() == getattr(chosen, name).tolist()
    # Copied 7 is at depth 1, before or after the head's first guess: the order of the choices.
    expected = [[6, 7, 1, 5]] if repeats else [[6, 1, 2, 3]]
    assert nodes_BM[:1].tolist() == expected


def test_recorded_lengths_end_with_the_text():
    text = [1, 2, 3, 1, 2, 3, 1, 4]
    lengths = jax.jit(copied_lengths, static_argnums=2)
    got, matches = lengths(np.array([*text, 2, 3]), np.int32(len(text)), 3)
    assert matches[: len(text) - 1].tolist() == [0, 0, 1, 2, 3, 4, 0]
    # The root at 3 is 1 and 2 3 1 follow; that at 4 is followed by 3 1, then 2 for 4; ...
    expected = [
        next((i for i, (a, b) in enumerate(zip(copied(text[: t + 2], 3), ahead)) if a != b),
             min(3, len(ahead)))
        for t in range(len(text) - 1)
        for ahead in [text[t + 2 :]]
    ]  # fmt: skip
    assert got[: len(text) - 1].tolist() == expected
    assert expected[2:5] == [3, 2, 1]


def check_copied(prompt, tokens, depths):
    """Tokens of negative depths are those that a step could copy; returns their number."""
    begins = [i for i, depth in enumerate(depths) if abs(depth) == 1]
    for i in begins:
        later = depths[i + 1 :]
        run = 1 + next((n for n, d in enumerate(later) if abs(d) < 2), len(later))
        own = depths[i : i + run]
        assert len({depth < 0 for depth in own}) == 1
        if own[0] < 0:
            assert tokens[i : i + run] == copied(prompt + tokens[:i], 3)[: len(own)]
    return sum(depth < 0 for depth in depths)


def test_copies_save_steps():
    """A small vocabulary, so that much repeats."""
    model = random_model(CONFIG, 3)
    request = DecodeRequest([[1, 2, 1], [5], [3, 4, 3, 4, 3, 6, 0]], [40, 17, 33])
    known = plain_texts(CONFIG, model, request)
    steps = {}
    for tree in (TREE, SPARED, TREE.drafted):
        progress = drafted(CONFIG, model, request, known, tree, 5)
        steps[tree] = np.asarray(progress.histogram_BL).sum()
        n_copied = 0
        for prompt, tokens, depths in zip(request.prompts, known, progress.depth_BO):
            n_copied += check_copied(prompt, tokens, depths.tolist()[: len(tokens)])
        assert bool(n_copied) == (tree != TREE.drafted)
    assert max(steps[TREE], steps[SPARED]) < steps[TREE.drafted]


def test_rules_that_read_the_drafts_copy_nothing_or_have_no_spares():
    """Rejection needs the law of every draft. Rows decide together whether spares are used, and no text
    may depend on other rows."""
    _, llama, _ = random_model(CONFIG, 3)
    engine = Engine(llama, planted(CONFIG), TREE, "rejection")
    assert engine.tree == TREE.drafted.dense and not engine.keeps_text
    some = Tree.from_choices([[0], [1], [0, 0], [-1], [-1, -1], [2]])
    assert SPARED.fixed == some and TREE.fixed == TREE
    assert Engine(llama, planted(CONFIG), SPARED, "typical").tree == some
    assert Engine(llama, planted(CONFIG), SPARED).tree == SPARED
