"""The rows of a microbatch over the devices of a mesh: each part adds up by itself."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from medusa_jax.sharding import ROWS, row_shards


class Parts(NamedTuple):
    """How rows lie over the axes `ROWS` of a mesh, and how kernels are held meanwhile.

    Left to XLA, a gradient that a loop adds up is summed over all devices in every round: those
    of draft heads' LM heads in each chunk of the loss. So here rows are [P, B / P, ...], one part
    P for each device that rows lie over, what is added up has that axis too, and it is summed
    once, behind the loop. Kernels are gathered once, before it. The tensor axis stays XLA's.

    On one device, or where the devices do not divide the rows, there is no such axis.

    Attributes:
      mesh: None where there is one part.
      specs: the table's for each parameter.
    """

    mesh: Mesh | None
    specs: tuple[Spec, ...]

    @classmethod
    def of(cls, mesh: Mesh | None, n_rows: int, specs: Sequence[Spec]) -> "Parts":
        """The parts of `n_rows` rows."""
        if mesh is None or row_shards(mesh) == 1 or n_rows % row_shards(mesh):
            return cls(None, ())
        return cls(mesh, tuple(specs))

    def gathered(self, params: list[jax.Array]) -> list[jax.Array]:
        """Parameters, whole but for the tensor axis."""
        return self._placed(params, ())

    def zeros(self, tree: Any) -> Any:
        """What each part adds things like those of the tree to: [P, ...]."""
        n = () if self.mesh is None else (row_shards(self.mesh),)
        return jax.tree.map(lambda x: jnp.zeros((*n, *x.shape), x.dtype), tree)

    def gradients(self, params: list[jax.Array]) -> list[jax.Array]:
        """`zeros` for the gradients of the parameters."""
        return self._placed(self.zeros(params), (ROWS,))

    def split(self, tree: Any) -> Any:
        """Rows [B, ...] -> [P, B / P, ...]."""
        if self.mesh is None:
            return tree
        n = row_shards(self.mesh)
        return jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), tree)

    def joined(self, tree: Any) -> Any:
        """The inverse of `split`."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

    def each(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """fn(shared, *of_a_part) -> the same function of all parts."""

        def of_all(shared: Any, *rows: Any) -> Any:
            return jax.vmap(fn, in_axes=(None, *[0] * len(rows)))(shared, *rows)

        return fn if self.mesh is None else of_all

    def total(self, tree: Any) -> Any:
        """The sums [...] of what all parts have [P, ...]."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), tree)

    def _placed(self, arrays: list[jax.Array], first: tuple[Any, ...]) -> list[jax.Array]:
        if self.mesh is None:
            return arrays
        out = []
        for x, spec in zip(arrays, self.specs, strict=True):
            axes = [axis if axis == "tensor" else None for axis in spec]
            sharding = NamedSharding(self.mesh, Spec(*first, *axes))
            out.append(jax.lax.with_sharding_constraint(x, sharding))
        return out
