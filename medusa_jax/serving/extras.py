"""Log-probabilities and penalties of a batch's rows, stored apart from its state.

Only the programs of some groups read them, and most batches never have any: each part is allocated when the
first row has it.
"""

from collections.abc import Iterable

import numpy as np

from medusa_jax.decoding import rows
from medusa_jax.decoding.state import Engine
from medusa_jax.serving.job import Group
from medusa_jax.sharding import PyTree, placed


class BatchExtras:
    """The extras of all rows.

    Args:
      engine: has log-probabilities.
      n_rows: of the batch.
      outputs: most new tokens of a row.
    """

    def __init__(self, engine: Engine, n_rows: int, outputs: int) -> None:
        self._engine, self._n_rows, self._outputs = engine, n_rows, outputs
        self._parts: dict[str, PyTree] = {}  # of all rows

    def row(self, at: int) -> rows.RowExtras:
        """Copy the extras of a row."""
        parts = self._parts.items()
        return rows.RowExtras(**{name: self._row_of(part, at) for name, part in parts})

    def put(self, row: rows.RowExtras, at: int) -> None:
        """Overwrite the extras of row `at` by those that `row` has."""
        for name, part in _present(row).items():
            if name not in self._parts:
                self._parts[name] = getattr(self._empty(self._n_rows), name)
            self._parts[name] = self._with_row(self._parts[name], part, at)

    def store(self, extras: rows.RowExtras) -> None:
        """Store the extras of all rows after a step; parts that the step did not read stay."""
        self._parts |= _present(extras)

    def of_group(self, group: Group) -> rows.RowExtras:
        """Return the parts that a group's programs read."""
        return parts_of(rows.RowExtras(**self._parts), group)

    def compile(self, group: Group, sizes: Iterable[int]) -> None:
        """Run once the programs that move a row of this group between batches of these sizes.

        A row of the group must have been put before.
        """
        parts = _present(self.of_group(group))
        for n_rows in sizes:
            empty = self._empty(n_rows)
            for name, part in parts.items():
                row, target = self._row_of(part, 0), getattr(empty, name)
                for _ in range(2):  # the first run's result may be placed differently
                    target = self._with_row(target, row, 0)
                self._row_of(target, 0)

    def _empty(self, n_rows: int) -> rows.RowExtras:
        tokens_BO = np.zeros((n_rows, self._outputs), np.int32)
        mesh = self._engine.llama.mesh
        return rows.empty_extras(self._engine, placed(mesh, tokens_BO))

    def _row_of(self, part: PyTree, at: int) -> PyTree:
        return rows.take_row(self._engine, part, np.int32(at))

    def _with_row(self, part: PyTree, row: PyTree, at: int) -> PyTree:
        return rows.insert_row(self._engine, part, row, np.int32(at))


def parts_of(extras: rows.RowExtras, group: Group) -> rows.RowExtras:
    """Return the extras that a group's programs read."""
    return rows.RowExtras(
        extras.logprobs if group.logprobs else None,
        extras.penalties if group.penalties else None,
    )


def _present(extras: rows.RowExtras) -> dict[str, PyTree]:
    """Return the parts that these have, by name."""
    return {name: part for name, part in extras._asdict().items() if part is not None}
