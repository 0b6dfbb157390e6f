"""Base class of the baselines."""

import jax

from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Drafter, Params, TextRows
from medusa_jax.model.backbone import Backbone


class Untrained(Drafter):
    """Base class of drafters without heads: nothing to train, no teacher-forced scores."""

    trained = False

    def init(self, key: jax.Array, backbone: Backbone) -> Params:
        raise UserError(f"{self.name} has no heads to train or to load")

    def features(self, params: Params, backbone: Backbone, rows: TextRows) -> jax.Array:
        raise UserError(
            f"{self.name} has no heads to fit a tree to: choose a tree with --tree"
        )
