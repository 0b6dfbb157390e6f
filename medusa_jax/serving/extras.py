"""Log-probabilities and penalties of a batch's rows, stored apart from its state.

Only the programs of some groups read them, and most batches never have any: each part is allocated when the
first row has it.
"""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from medusa_jax.decoding import rows
from medusa_jax.decoding.logprobs import Logprobs
from medusa_jax.decoding.penalties import Penalties
from medusa_jax.decoding.state import Engine
from medusa_jax.serving.job import Group
from medusa_jax.sharding import placed

Part = TypeVar("Part", Logprobs, Penalties)


class BatchExtras:
    """The extras of all rows.

    Args:
      engine: has log-probabilities.
      n_rows: of the batch.
      outputs: most new tokens of a row.

    Attributes:
      logprobs, penalties: of all rows; None until a row has them.
    """

    def __init__(self, engine: Engine, n_rows: int, outputs: int) -> None:
        self._engine, self._n_rows, self._outputs = engine, n_rows, outputs
        self.logprobs: Logprobs | None = None
        self.penalties: Penalties | None = None

    def row(self, at: int) -> rows.RowExtras:
        """Copy the extras of a row."""
        logprobs, penalties = self.logprobs, self.penalties
        if logprobs is not None:
            logprobs = rows.take_row(self._engine, logprobs, np.int32(at))
        if penalties is not None:
            penalties = rows.take_row(self._engine, penalties, np.int32(at))
        return rows.RowExtras(logprobs, penalties)

    def put(self, row: rows.RowExtras, at: int) -> None:
        """Overwrite the extras of row `at` by those that `row` has."""
        if row.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = self._empty(self._n_rows).logprobs
            self.logprobs = self._with_row(self.logprobs, row.logprobs, at)
        if row.penalties is not None:
            if self.penalties is None:
                self.penalties = self._empty(self._n_rows).penalties
            self.penalties = self._with_row(self.penalties, row.penalties, at)

    def store(self, extras: rows.RowExtras) -> None:
        """Store the extras of all rows after a step; parts that the step did not read stay."""
        if extras.logprobs is not None:
            self.logprobs = extras.logprobs
        if extras.penalties is not None:
            self.penalties = extras.penalties

    def of_group(self, group: Group) -> rows.RowExtras:
        """Return the parts that a group's programs read."""
        return parts_of(rows.RowExtras(self.logprobs, self.penalties), group)

    def compile(self, group: Group, sizes: Iterable[int]) -> None:
        """Run once the programs that move a row of this group between batches of these sizes.

        A row of the group must have been put before.
        """
        parts = self.of_group(group)
        for n_rows in sizes:
            empty = self._empty(n_rows)
            if parts.logprobs is not None:
                self._move_first(parts.logprobs, empty.logprobs)
            if parts.penalties is not None:
                self._move_first(parts.penalties, empty.penalties)

    def _move_first(self, part: Part, target: Part | None) -> None:
        """Copy the first row of one batch's part to another's."""
        row = rows.take_row(self._engine, part, np.int32(0))
        for _ in range(2):  # the first run's result may be placed differently
            target = rows.insert_row(self._engine, target, row, np.int32(0))
        rows.take_row(self._engine, target, np.int32(0))

    def _empty(self, n_rows: int) -> rows.RowExtras:
        tokens_BO = np.zeros((n_rows, self._outputs), np.int32)
        mesh = self._engine.llama.mesh
        return rows.empty_extras(self._engine, placed(mesh, tokens_BO))

    def _with_row(self, part: Part | None, row: Part, at: int) -> Part:
        merged: Part = rows.insert_row(self._engine, part, row, np.int32(at))
        return merged


def parts_of(extras: rows.RowExtras, group: Group) -> rows.RowExtras:
    """Return the extras that a group's programs read."""
    return rows.RowExtras(
        extras.logprobs if group.logprobs else None,
        extras.penalties if group.penalties else None,
    )
