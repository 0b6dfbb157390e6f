"""Which tree for how many rows: the fastest for one may be slow for eight."""

from collections.abc import Sequence

from medusa_jax.api import Model, device_tree
from medusa_jax.tree import Tree


def trees_by_rows(model: Model, sizes: Sequence[int], measured: bool) -> dict[int, Tree]:
    """The tree for each number of rows.

    Args:
      measured: measure which is fastest on this device, at first use, where the tree file says what
        each size gives; else they are the model's own.
    """
    calibrated = model.calibrated
    if not (measured and device_tree.is_measured(calibrated)):
        return {rows: model.tree_at(rows) for rows in sizes}
    ladder = device_tree.measured_ladder(model, calibrated, sizes)
    return {rows: ladder.at(rows) for rows in sizes}
