"""Tree growth equals exhaustive search, and replaying the walk predicts what decoding measures."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import all_trees

from medusa_jax.tree import growth as fit
from medusa_jax.tree.tree import Order, Tree


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_joint_growth_equals_exhaustive_search(size: int) -> None:
    rng = np.random.default_rng(size)
    tuples = rng.choice([0, 1, 2, fit.MISS], p=[0.45, 0.25, 0.1, 0.2], size=(300, 3))
    best = max(fit.expected_tokens(tuples, tree) for tree in all_trees(3, 3, size))
    grown = Tree.from_choices(fit.joint_growth(tuples, size))
    assert fit.expected_tokens(tuples, grown) == pytest.approx(best, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 30))
def test_every_prefix_of_a_growth_is_a_tree(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    tuples = rng.integers(0, 4, size=(50, 3)) * rng.choice([1, fit.MISS], size=(50, 3))
    growth = fit.joint_growth(np.minimum(tuples, fit.MISS), size)
    for n in range(len(growth) + 1):
        Tree.from_choices(growth[:n])  # raises if a prefix is missing


def test_paper_s_expectation_on_a_hand_made_case() -> None:
    # Four positions; rank tuples of heads 1 and 2. Tree: [0], [1], [0,0].
    tuples = np.array([[0, 0], [0, 1], [1, 0], [fit.MISS, 0]])
    tree = Tree.from_choices([[0], [1], [0, 0]])
    # [0] is right at 2 of 4 positions, [1] at 1, [0,0] at 1: 1 + (2 + 1 + 1) / 4.
    assert fit.expected_tokens(tuples, tree) == 2.0
    # Replay: position 0 accepts two drafts and moves on by 3, position 3 accepts none.
    assert fit.replayed_tokens([fit.TextRanks.of_heads(tuples)], tree) == 2.0
    assert fit.head_accuracies(tuples, 2).tolist() == [[0.5, 0.25], [0.75, 0.25]]


def test_trees_are_counted_on_texts_they_were_not_grown_from() -> None:
    """Two texts with nothing in common: each one's tree is worth nothing on the other."""
    texts = [fit.TextRanks.of_heads(np.full((30, 2), rank)) for rank in (0, 5)]

    def grow(texts: list[fit.TextRanks]) -> Order:
        return fit.order_by_steps(texts, 4, copies=False)

    assert fit.held_out_tokens(texts, grow, [1, 3]) == [1.0, 1.0]
    assert fit.replayed_tokens(texts, Tree.from_choices([[0], [0, 0]])) == 60 / (10 + 30)
    # The first fold has texts 0 and 2, the second text 1; all alike, all three drafts fit.
    assert fit.held_out_tokens([texts[0]] * 3, grow, [1, 2, 3]) == [1.0, 2.0, 3.0]


def recorded_at_random(seed: int, n: int = 60) -> fit.TextRanks:
    rng = np.random.default_rng(seed)
    ranks = rng.choice([0, 0, 1, 2, fit.MISS], size=(n, 3))
    copied = rng.choice([0, 0, 1, 2, 4], size=n)
    return fit.TextRanks(ranks, copied, rng.random(n) < 0.6)


def test_every_node_of_a_growth_saves_most_steps() -> None:
    """By the definition: the likelier child at the starts of steps, or the next copied node."""
    kinds = set()

    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 10_000), st.booleans())
    def check(seed: int, copies: bool) -> None:
        texts = [recorded_at_random(seed + n, 20 + n) for n in range(3)]
        if not copies:
            texts = [fit.TextRanks.of_heads(text.ranks_PK) for text in texts]
        growth = fit.growth_by_steps(texts, 9)
        kinds.add((copies, len({c[0] < 0 for c in growth})))
        for n, added in enumerate(growth):
            tree = Tree.from_choices(growth[:n])
            gains = gains_at_starts(texts, tree)
            n_copied = len(tree.copied_C)
            copied = (-1,) * (n_copied + 1)
            most = max(gains.values(), default=0)
            others = [c for c, gain in gains.items() if gain == most]
            if any((text.copied_P > n_copied).any() for text in texts):
                others.append(copied)
            larger = {c: Tree.from_choices([*growth[:n], c]) for c in others}
            steps = {c: fit.replay(texts, one)[1] for c, one in larger.items()}
            assert added in steps
            # Of children that are right equally often any may be the one that is considered.
            children = [steps[c] for c in steps if c != copied]
            if added == copied:
                assert not children or steps[copied] < max(children)
            else:
                assert steps[added] <= steps.get(copied, steps[added])

    check()
    assert kinds >= {(True, 2), (False, 1)}


def gains_at_starts(texts: list[fit.TextRanks], tree: Tree) -> dict[tuple[int, ...], int]:
    """How often each child that the tree lacks would lengthen a step of these texts."""
    nodes, n_copied = set(tree.choices), len(tree.copied_C)
    gains: dict[tuple[int, ...], int] = {}
    for ranks_PK, copied_P, _ in texts:
        at = 0
        while at < len(ranks_PK):
            path: tuple[int, ...] = ()
            ranks = ranks_PK[at].tolist()
            while len(path) < len(ranks) and (*path, ranks[len(path)]) in nodes:
                path = (*path, ranks[len(path)])
            copied = min(int(copied_P[at]), n_copied)
            if copied <= len(path) < len(ranks) and ranks[len(path)] < fit.MISS:
                child = (*path, ranks[len(path)])
                gains[child] = gains.get(child, 0) + 1
            at += max(len(path), copied) + 1
    return gains


def test_a_long_run_of_copies_does_not_outweigh_text_with_short_steps() -> None:
    ranks = np.array([[fit.MISS]] * 6 + [[0]] * 4)
    text = fit.TextRanks(ranks, np.array([6, 5, 4, 3, 2, 1, 0, 0, 0, 0]), np.ones(10, bool))
    growth = fit.growth_by_steps([text], 3)
    assert growth == [(-1,), (0,), (-1, -1)]
    steps = [fit.replay([text], Tree.from_choices(growth[:n]))[1] for n in range(4)]
    assert steps == [10, 7, 5, 4]


def test_a_replay_takes_the_longer_of_what_is_drafted_and_what_is_copied() -> None:
    ranks = np.array([[0, 0], [0, 0], [fit.MISS, 0], [0, fit.MISS], [0, 0], [0, 0]])
    text = fit.TextRanks(ranks, np.array([3, 0, 0, 0, 0, 1]), np.zeros(6, bool))
    tree = Tree.from_choices([[0], [-1], [-1, -1]])
    # Two of the three copied tokens have nodes: on to position 3; one draft each there and at 5.
    assert fit.replay([text], tree) == (6, 3)
    assert fit.replay([text], tree.drafted) == (6, 4)


def test_spares_count_where_the_text_does_not_repeat() -> None:
    ranks = np.array([[1], [1], [0], [0], [0]])
    text = fit.TextRanks(ranks, np.array([1, 0, 0, 1, 0]), np.array([1, 0, 0, 1, 0], bool))
    tree = Tree.from_choices([[-1], [0]], [[1], [0], [2]])
    # One token copied at 0, the first guess at 2, the end at 4.
    assert fit.replay([text], tree) == (5, 3)
    # Elsewhere the nodes are [0] and [1].
    assert fit.replay([text._replace(repeats_P=np.zeros(5, bool))], tree) == (5, 3)
    other = text._replace(copied_P=np.zeros(5, int), repeats_P=np.zeros(5, bool))
    assert fit.replay([other], tree) == fit.replay([other], tree.drafted) == (5, 3)
    assert fit.replay([other], Tree(tree.choices)) == (5, 4)


def test_a_growth_with_spares_is_counted_by_the_replay() -> None:
    """Each node is the one of the two with fewest steps, spares included."""
    kinds = set()

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 10_000))
    def check(seed: int) -> None:
        texts = [recorded_at_random(seed + n, 20 + n) for n in range(3)]
        order = fit.order_by_steps(texts, 8, copies=True)
        heads = [fit.TextRanks.of_heads(text.ranks_PK) for text in texts]
        assert order.spares == fit.growth_by_steps(heads, 8)
        for size in range(1, len(order.growth) + 1):
            tree = order.tree(size + 1)
            if tree.copied_C.size and not tree.spares:
                continue  # fewer spares are left than copied nodes
            copied = (-1,) * (len(order.tree(size).copied_C) + 1)
            other = Tree.from_choices([*order.growth[: size - 1], copied], order.spares)
            steps = [fit.replay(texts, one)[1] for one in (tree, other)]
            drafted = order.growth[size - 1] != copied
            kinds.add(drafted)
            possible = any((text.copied_P >= len(copied)).any() for text in texts)
            if drafted and other.spares and possible:
                assert steps[0] <= steps[1]

    check()
    assert kinds == {True, False}
