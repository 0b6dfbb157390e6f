"""Trees by products of head accuracies equal exhaustive search."""

import itertools

import numpy as np
import pytest
from trees import all_trees

from medusa_jax.tree.tree import Tree
from research import paper_growth as fit


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_product_growth_equals_exhaustive_search(size: int) -> None:
    accuracy = np.array([[0.5, 0.2, 0.1], [0.4, 0.25, 0.05], [0.3, 0.1, 0.1]])

    def worth(tree: Tree) -> float:
        return sum(
            float(np.prod([accuracy[d, r] for d, r in enumerate(path)]))
            for path in tree.choices
        )

    best = max(worth(tree) for tree in all_trees(3, 3, size))
    assert worth(Tree.from_choices(fit.product_growth(accuracy, size))) == pytest.approx(
        best
    )


def test_best_cartesian_is_the_best_of_all_widths():
    assert fit.best_cartesian(np.array([[0.6, 0.2]] * 3), 4) == [1, 1, 1]
    rng = np.random.default_rng(0)
    for n_nodes in (2, 9, 30):
        accuracy = np.sort(rng.dirichlet(np.ones(6), 3)[:, :5])[:, ::-1]

        def tokens(widths, accuracy=accuracy):
            within = [accuracy[k, :w].sum() for k, w in enumerate(widths)]
            return 1 + np.cumprod(within).sum()

        every = [
            widths
            for depth in (1, 2, 3)
            for widths in itertools.product(range(1, 6), repeat=depth)
            if Tree.cartesian(widths).n_nodes <= n_nodes
        ]
        found = fit.best_cartesian(accuracy, n_nodes)
        assert tuple(found) in every
        assert np.isclose(tokens(found), max(map(tokens, every)))
