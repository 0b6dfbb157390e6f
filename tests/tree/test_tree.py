"""The static tree: shapes, order, masks, and what is refused."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import trees

from medusa_jax.errors import UserError
from medusa_jax.tree.files import TreeFile, parse_tree
from medusa_jax.tree.tree import Tree

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def test_mask_of_the_papers_figure_2():
    """Top 2 of head 1 times top 3 of head 2: nodes root, A, B, then A's and B's children."""
    tree = Tree.cartesian([2, 3])
    assert tree.choices == ((0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    expected = "x........ xx....... x.x...... xx.x..... xx..x.... xx...x... x.x...x.. x.x....x. x.x.....x"
    got = ["".join("x" if seen else "." for seen in row) for row in tree.mask_MM]
    assert got == expected.split()
    assert tree.depth_M.tolist() == [0, 1, 1, 2, 2, 2, 2, 2, 2]


@SETTINGS
@given(trees(max_rank=6))
def test_mask_is_the_transitive_closure_of_the_parents(tree):
    M = tree.n_nodes
    assert len(tree.choices) + 1 == M
    assert (tree.parent_M[1:] < np.arange(1, M)).all()  # parents come first
    step = np.zeros((M, M), bool)
    step[np.arange(M), tree.parent_M] = True
    reach = np.eye(M, dtype=bool)
    for _ in range(M):
        reach = reach | (reach.astype(int) @ step.astype(int) > 0)
    np.testing.assert_array_equal(tree.mask_MM, reach)
    np.testing.assert_array_equal(tree.mask_MM.sum(1), tree.depth_M + 1)


@SETTINGS
@given(trees(max_rank=6))
def test_ancestors_are_the_prefixes_of_a_path(tree):
    index = {(): 0} | {c: i + 1 for i, c in enumerate(tree.choices)}
    for node, path in enumerate([(), *tree.choices]):
        expected = [index[path[:d]] for d in range(len(path) + 1)]
        expected += [node] * (tree.path_length - len(expected))
        assert tree.ancestors_ML[node].tolist() == expected
        assert tree.rank_M[node] == (path[-1] if path else 0)
        assert node in tree.level(len(path))


@SETTINGS
@given(trees(), st.randoms(use_true_random=False))
def test_the_order_of_the_choices_plays_no_part(tree, random):
    shuffled = [list(c) for c in tree.choices]
    random.shuffle(shuffled)
    again = Tree.from_choices(shuffled)
    assert again == tree and hash(again) == hash(tree)
    np.testing.assert_array_equal(again.parent_M, tree.parent_M)
    if tree.choices:
        leaf = max(tree.choices, key=len)
        assert Tree.from_choices([c for c in tree.choices if c != leaf]) != tree


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([[0, 1]], r"\[0, 1\] needs its prefix \[0\]"),
        ([[0], [1], [0]], r"\[0\] is given twice"),
        ([[0], [-3]], r"\[-3\] holds a negative rank"),
        ([[0], []], "empty"),
        ([[0], [1.0]], r"\[1\.0\]"),
        ([[True]], r"\[True\]"),
        ([None], "None"),
        ([[0], [0, -1]], r"\[0, -1\] holds a negative rank"),
        ([[0] * d for d in range(1, 129)], "128 deep"),
        ([[rank] for rank in range(4096)], "this one has 4097"),
    ],
)
def test_choices_that_make_no_tree_are_named(choices, words):
    with pytest.raises(UserError, match=words):
        Tree.from_choices(choices)


def test_too_deep_for_the_heads():
    """Or for a drafter without heads; of all choices that are, the deepest is named."""
    tree = Tree.from_choices([[0], [0, 3], [0, 3, 1]])
    tree.check_depth(3)
    for n in (2, 1):
        words = rf"\[0, 3, 1\] is 3 deep, but trees of this drafter are at most {n} deep"
        with pytest.raises(UserError, match=words):
            tree.check_depth(n)


def parsed(spec, file=None):
    return parse_tree(spec, file, auto=Tree.chain(2))


def tree_file(path, choices, **content):
    path.write_text(json.dumps({"choices": choices, **content}))
    return TreeFile.read(path)


def test_tree_files(tmp_path):
    plain, rich = tmp_path / "plain.json", tmp_path / "rich.json"
    plain.write_text("[[0], [0, 1]]")
    read = tree_file(rich, [[0], [0, 1]], device="cpu")
    found = [parsed(str(file)) for file in (plain, rich)]
    assert found == [Tree.from_choices([[0], [0, 1]])] * 2
    assert read.content["device"] == "cpu" and read.order.growth == [[0], [0, 1]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[[0], [0, 1", "not valid JSON"),
        ('{"tree": []}', "does not say choices"),
        ('"none"', "choices should be list"),
        ('{"choices": [], "growth": [[0, 1]]}', "needs its prefix"),
        ('{"choices": [], "evidence": [1]}', "evidence should be dict"),
        ('{"choices": [], "evidence": {"ladder": 3}}', "ladder should be list"),
        ('{"choices": [], "evidence": {"ladder": [{"nodes": 2}]}}', "tokens_per_step"),
        ('{"choices": [], "batches": [{"batch": true}]}', "batch should be int"),
        ('{"choices": [[-1]], "spares": [[0, 0], [0]]}', "listed before its prefix"),
        ("[[0], 4]", "a list of list"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_tree_files_that_cannot_be_used_are_named(tmp_path, content, words):
    file = tmp_path / "tree.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=words) as caught:
        parsed(str(file))
    assert str(file) in str(caught.value)


def test_specs(tmp_path):
    assert parsed("none") == Tree.none()
    assert parsed("chain:3") == Tree.chain(3)
    assert parsed("cartesian:2,3") == Tree.cartesian([2, 3])
    file = tree_file(tmp_path / "a.json", [[0], [1]], growth=[[0], [0, 0], [1], [2]])
    assert parsed("bundled", file) == Tree.from_choices([[0], [1]])
    assert parsed("auto", file) == Tree.chain(2)
    assert parsed("3", file) == Tree.from_choices([[0], [0, 0]])
    assert parsed("1", file) == Tree.none() and parsed("5", file).n_nodes == 5
    assert parsed("2", tree_file(tmp_path / "b.json", [[0], [1]])) == Tree.from_choices(
        [[0]]
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("chain:x", "chain:4"),
        ("chain:-1", "-1"),
        ("cartesian:2,", "cartesian:2,3"),
        ("cartesian:0,2", r"\[0, 2\]"),
        ("cartesian:64,64,64,64", "at most 4096 nodes and is at most 127 deep"),
        ("chain:1000000000", "this one has 1000000001 and is 1000000000 deep"),
        ("copy:128", "is 128 deep"),
        ("copy:2+copy:3", "copy is given twice"),
        ("chain:2+copy:2+copy:3", "copy is given twice"),
        ("", "--tree is empty"),
        ("chain:2+copy:x", r"chain:2\+copy:x': write chain:4, copy:4"),
        ("bundled", "calibrate"),
        ("64", "next to draft heads.*without one give chain:4"),
        ("\u00b2", "cannot read the tree file \u00b2"),
        ("no/nothing.json", r"nothing\.json: No such file|cannot read.*nothing\.json"),
    ],
)
def test_specs_that_name_no_tree(spec, words):
    with pytest.raises(UserError, match=words):
        parsed(spec)


@pytest.mark.parametrize("size", [0, 6])
def test_sizes_beyond_the_calibrated_order(size, tmp_path):
    file = tree_file(tmp_path / "tree.json", [], growth=[[0], [1], [2], [3]])
    with pytest.raises(UserError, match="1 to 5"):
        parsed(str(size), file)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trees())
def test_a_dense_tree_has_the_same_shape_and_ranks_without_gaps(tree):
    dense = tree.dense
    np.testing.assert_array_equal(dense.parent_M, tree.parent_M)
    np.testing.assert_array_equal(dense.depth_M, tree.depth_M)
    assert Tree.from_choices(dense.choices) == dense  # well-formed and in order
    assert dense.dense == dense
    for node in range(tree.n_nodes):
        family = np.flatnonzero(dense.parent_M[1:] == node) + 1
        assert dense.rank_M[family].tolist() == list(range(len(family)))
        assert [c for c in tree.children_MC[node] if c] == family.tolist()
        ranks = tree.rank_M[family].tolist()
        assert ranks == sorted(ranks)  # the order of the family is kept
