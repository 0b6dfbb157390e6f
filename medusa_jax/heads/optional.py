"""Optional parts of the contract of drafters, which only some families have.

A drafter has such a part if its class has these methods; nothing is registered.
"""

from typing import Protocol, runtime_checkable

import jax

from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Drafter, TextRows
from medusa_jax.model.backbone import Backbone
from medusa_jax.sharding import Params


@runtime_checkable
class SupportsLevels(Protocol):
    """All levels of drafts share their parameters, so training chooses how many it unrolls (`train.levels`)."""

    def with_levels(self, levels: int) -> Drafter:
        """The drafter with only these levels, and the same parameters.

        Raises:
          UserError: fewer than one, or more than there are.
        """


@runtime_checkable
class SupportsAnchors(Protocol):
    """Features can be limited to some positions of each row (`train.anchors`)."""

    def features_at(
        self, params: Params, backbone: Backbone, rows: TextRows, index_BA: jax.Array
    ) -> jax.Array:
        """Columns `index` of `Drafter.features` [K, B, A, D]."""


@runtime_checkable
class SupportsConfidence(Protocol):
    """A further output estimates whether a guess will be accepted (`train.confidence_weight`)."""

    @property
    def has_confidence(self) -> bool:
        """Whether this drafter has that output; its parameters are among `Drafter.head_params`."""

    def confidence(self, params: Params, features: jax.Array) -> jax.Array:
        """Logit [...] of the probability that a guess with these features [..., D] is accepted."""


@runtime_checkable
class SupportsInduction(Protocol):
    """The first layer attends over the text, and can learn to copy from it (`train.induction_weight`)."""

    def queries_keys(
        self, params: Params, backbone: Backbone, rows: TextRows
    ) -> tuple[jax.Array, jax.Array]:
        """Rotated queries [B, T, N, H] and keys [B, G, T, H] of that layer; row t reads tokens up to t + 1."""


def loss_view(drafter: Drafter, levels: int = 1) -> Drafter:
    """The drafter whose heads the training loss covers; it has the same parameters.

    Args:
      levels: `train.levels`.

    Raises:
      UserError: more than one level for a drafter whose heads have separate parameters, or more than there are.
    """
    if isinstance(drafter, SupportsLevels):
        return drafter.with_levels(levels)
    if levels != 1:
        raise UserError(
            f"train.levels {levels} is for drafters whose levels share their layers, such as "
            f"eagle; all heads of {drafter.name} train anyway"
        )
    return drafter


def has_confidence(drafter: Drafter) -> bool:
    """Whether the drafter estimates if its guesses will be accepted."""
    return isinstance(drafter, SupportsConfidence) and drafter.has_confidence
