"""Which tree for how many rows: what pays for one may not pay for eight."""

from collections.abc import Sequence

from medusa_jax.api import Model, device_tree
from medusa_jax.tree import Tree, tree_of_size


def trees_by_rows(model: Model, sizes: Sequence[int], measured: bool) -> dict[int, Tree]:
    """The tree for each number of rows.

    Args:
      measured: measure which pays on this device, at first use, where the tree file says what
        each size gives; else it is the model's own for all.
    """
    calibrated = model.calibrated
    if not (measured and device_tree.is_measured(calibrated)):
        return dict.fromkeys(sizes, model.tree)
    trees = {}
    for rows in sizes:
        kept = device_tree.kept_choice(
            calibrated,
            rows,
            model.config,
            model.drafter.heads,
            model.dtype,
            model.storage,
            model.mesh,
        )
        size = device_tree.kept_size(kept)
        if size is None:
            size = device_tree.choose_on_device(model, calibrated, rows, kept)["nodes"]
        trees[rows] = tree_of_size(calibrated["growth"], size)
    return trees
