"""Trees of one depth and random dense ones: what is counted, what is timed, what lies between."""

import numpy as np

from medusa_jax.evaluate import shapes
from medusa_jax.tree import Tree, growth


def texts(K):
    """Ranks that fall off geometrically, in four texts."""
    rng = np.random.default_rng(0)
    ranks = (rng.geometric(0.5, (300, K)) - 1 for _ in range(4))
    return [growth.Recorded.of_heads(r) for r in ranks]


def test_trees_of_one_depth_leave_deeper_heads_out():
    def grow(recorded):
        return growth.joint_growth(recorded.ranks_PK, 127)

    five = texts(5)
    sizes = (22, 35, 45, 64)
    found = shapes.of_one_depth(five, grow, (*sizes, 200))
    assert [tree.n_nodes for tree in found] == list(sizes)
    assert [tree.depth for tree in found] == [4] * 4
    four = shapes.of_one_depth([text.cut(4) for text in five], grow, sizes)
    assert found == four
    lengths = list(found.values())
    assert lengths == sorted(lengths) and lengths[-1] > lengths[0] > 1.5


def test_dense_trees_are_cartesian_within_their_limit():
    dense = shapes.random_dense(4, 40)
    assert len(dense) == 40 == len({tree for _, tree in dense})
    for widths, tree in dense:
        assert tree == Tree.cartesian(widths) and tree.n_nodes <= 256
    sizes = sorted(tree.n_nodes for _, tree in dense)
    assert (
        sizes[0] < 16
        and sizes[-1] > 150
        and {tree.depth for _, tree in dense} == {1, 2, 3, 4}
    )
    assert shapes.random_dense(4, 40) == dense != shapes.random_dense(4, 40, seed=1)
    half, largest = shapes.to_time(dense)
    assert largest.n_nodes == sizes[-1] and 0.3 < half.n_nodes / sizes[-1] < 0.7
    # All there are of three nodes, root included.
    assert [widths for widths, _ in shapes.random_dense(2, 9, most_nodes=3)] == [
        [1],
        [1, 1],
        [2],
    ]
    assert shapes.to_time([]) == []
    narrow = shapes.random_dense(2, 9, most_wide=2)
    assert {width for widths, _ in narrow for width in widths} == {1, 2}


def test_latency_lies_between_trees_that_were_timed():
    seconds = {Tree.none(): 1.0, Tree.chain(4): 3.0, Tree.cartesian([4]): 3.0}
    assert shapes.latency(Tree.chain(4), seconds) == 3.0
    assert shapes.latency(Tree.chain(2), seconds) == 2.0
