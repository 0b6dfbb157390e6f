"""Drafter states with values per text position, and the changes that decode loops make to any state."""

from typing import Self

import jax
from flax import struct

from medusa_jax.model.cache import KVCache
from medusa_jax.sharding import PyTree


class PositionState(struct.PyTreeNode):
    """Base class of states with slots for text positions; slots [0, length) of a row are valid.

    A state without slots, such as the last hidden state, can be any pytree of arrays.
    """

    length_B: jax.Array

    def grow(self, slots: int) -> Self:
        """The same state with room for `slots` positions."""
        raise NotImplementedError


class CacheState(PositionState):
    """A cache of keys and values; a slot for each accepted position."""

    cache: KVCache

    def grow(self, slots: int) -> Self:
        return self.replace(cache=self.cache.grow(slots))


def _map(change: PyTree, state: PyTree) -> PyTree:
    def is_leaf(part: PyTree) -> bool:
        return isinstance(part, PositionState)

    return jax.tree.map(lambda x: change(x) if is_leaf(x) else x, state, is_leaf=is_leaf)


def grow_state(state: PyTree, slots: int) -> PyTree:
    """A drafter's state with room for `slots` positions."""
    return _map(lambda part: part.grow(slots), state)


def rewind_state(state: PyTree, length_B: jax.Array) -> PyTree:
    """A drafter's state truncated to the first `length_B` positions.

    The next `Drafter.commit` starts there with at least one position and replaces values that belong only
    to the last position, so these need not be restored.
    """
    return _map(lambda part: part.replace(length_B=length_B), state)
