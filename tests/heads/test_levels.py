"""The constants of a tree drafted level by level."""

from medusa_jax.heads.levels import Level, inner_nodes
from medusa_jax.tree import Tree


def test_levels_worked_example():
    tree = Tree.from_choices([[0], [1], [2], [0, 0], [2, 0], [2, 1], [2, 1, 0]])
    first, second, third = Level.of(tree)
    assert [x.tolist() for x in (first.nodes_P, first.rows_P)] == [[0], [0]]
    assert [x.tolist() for x in (first.parent_C, first.rank_C)] == [[0, 0, 0], [0, 1, 2]]
    assert [x.tolist() for x in (second.nodes_P, second.rows_P)] == [[0, 2], [0, 0]]
    assert [x.tolist() for x in (second.parent_C, second.rank_C)] == [[0, 1, 1], [0, 0, 1]]
    assert [x.tolist() for x in (third.nodes_P, third.rows_P)] == [[2], [1]]
    assert Level.of(Tree.none()) == []


def test_inner_nodes_are_those_with_children():
    tree = Tree.from_choices([[0], [1], [2], [0, 0], [2, 0], [2, 1]])
    inner = inner_nodes(Level.of(tree), tree)
    assert [nodes.tolist() for nodes in inner] == [[0], [1, 3]]
