"""Drafters that have the backbone run additional rows with every tree.

`Engine.extra` is the one place that asks whether a drafter is of this kind; other drafters need not
know about it.
"""

from typing import NamedTuple

import jax
import numpy as np

from medusa_jax.heads.drafter import Drafter
from medusa_jax.sharding import PyTree


class ExtraRows(NamedTuple):
    """Constants of the extra rows.

    All of them see the text and the root. No tree node sees them, and they are never emitted.

    Attributes:
      depth_X: distance of each row from the root.
      mask_XX: [x, y] is True if row x sees row y, itself included; the rows that a row sees have
        the depths 1, 2, ... up to its own, in the order of the rows.
      n_scored: U; the LM head runs on the last U rows.
    """

    depth_X: np.ndarray
    mask_XX: np.ndarray
    n_scored: int


class WithExtraRows(Drafter):
    """Base class of drafters that learn from extra rows of the verification pass."""

    @property
    def extra_rows(self) -> ExtraRows:
        """The extra rows to run along with every tree."""
        raise NotImplementedError

    def extra_tokens(self, state: PyTree) -> jax.Array:
        """Tokens of the extra rows in this step [B, X]."""
        raise NotImplementedError

    def learn(self, state: PyTree, root_B: jax.Array, logits_BUV: jax.Array) -> PyTree:
        """The state after the backbone's logits of the extra rows; called before this step's `commit`."""
        raise NotImplementedError
