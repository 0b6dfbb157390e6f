"""A tree for each number of rows, measured once."""

from types import SimpleNamespace

import pytest
from tiny import tiny_arch

from medusa_jax.api import device_tree
from medusa_jax.config import HeadsConfig
from medusa_jax.model.stored import Storage
from medusa_jax.serving import row_sizes
from medusa_jax.serving.trees import trees_by_rows
from medusa_jax.sharding import make_mesh
from medusa_jax.tree import Tree

GROWTH = [[0], [0, 0], [1]]


@pytest.fixture
def model(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(device_tree.VARIABLE)
    ladder = [{"nodes": 2, "tokens_per_step": 1.5}, {"nodes": 4, "tokens_per_step": 2.0}]
    return SimpleNamespace(
        calibrated={"growth": GROWTH, "evidence": {"ladder": ladder}},
        tree_at={1: Tree.chain(1), 2: Tree.none(), 3: Tree.none()}.get,
        config=tiny_arch(),
        drafter=SimpleNamespace(heads=HeadsConfig()),
        dtype="float32",
        storage=Storage(),
        mesh=make_mesh(),
    )


def test_each_number_of_rows_gets_what_is_fastest_there(model, monkeypatch):
    asked = []

    def timings(model, calibrated, rows):
        asked.append(rows)
        cost = {1: {4: 0.2}, 2: {2: 0.2, 4: 9.0}}.get(rows, {2: 9.0, 4: 9.0})
        pairs = [((1, 1.0), (nodes, seconds)) for nodes, seconds in cost.items()]
        return [one for pair in pairs for one in pair] * 3

    monkeypatch.setattr(device_tree, "timings", timings)
    sizes = row_sizes(6)
    assert sizes == [1, 2, 4, 6]
    for _ in range(2):  # measured, and kept
        trees = trees_by_rows(model, sizes, True)
        nodes = {rows: tree.n_nodes for rows, tree in trees.items()}
        assert nodes == {1: 4, 2: 2, 4: 1, 6: 1}
    assert asked == sizes


def test_what_was_asked_for_is_not_measured(model):
    """A tree file's ladder, taken as it is, has a rung for each number of rows."""
    assert trees_by_rows(model, [1, 2], False) == {1: Tree.chain(1), 2: Tree.none()}
    model.calibrated = None
    assert trees_by_rows(model, [3], True) == {3: Tree.none()}
