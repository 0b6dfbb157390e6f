"""Base class of the baselines, and their trees without scores."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import (
    Drafter,
    DraftRequest,
    Params,
    Proposal,
    Ranked,
    TextRows,
)
from medusa_jax.heads.fill import Level
from medusa_jax.model.backbone import Backbone

# Score difference between siblings of given tokens: the first takes all remaining mass at any temperature.
AHEAD = 1e30


class Untrained(Drafter):
    """Base class of drafters without heads: nothing to train, no teacher-forced scores."""

    trained = False

    def init(self, key: jax.Array, backbone: Backbone) -> Params:
        raise UserError(f"{self.name} has no heads to train or to load")

    def features(self, params: Params, backbone: Backbone, rows: TextRows) -> jax.Array:
        raise UserError(
            f"{self.name} has no heads to fit a tree to: choose a tree with --tree"
        )


def propose_given(
    request: DraftRequest,
    nodes_BM: jax.Array,
    drafted_BM: jax.Array,
    vocab_size: int,
    dtype: DTypeLike,
) -> Proposal:
    """A filled tree from a drafter without scores.

    The first child of a node gets all the mass, the next one all that remains, and so on. Rejection
    sampling then accepts each with the verifier's probability of that token. Under other rules the
    logits are not computed.

    Args:
      drafted_BM: False for nodes with a placeholder instead of a draft.
    """
    B, tree, ranked = nodes_BM.shape[0], request.tree, list[Ranked]()
    for depth, level in enumerate(Level.of(tree)):
        children = tree.level(depth + 1)
        mass_1C = -AHEAD * tree.rank_M[children][None, :]
        score_BC = jnp.where(drafted_BM[:, children], mass_1C, -jnp.inf)
        logits_BPV = jnp.full((B, len(level.nodes_P), vocab_size), -jnp.inf, dtype)
        at = (jnp.arange(B)[:, None], level.parent_C[None, :], nodes_BM[:, children])
        logits_BPV = logits_BPV.at[at].max(score_BC.astype(dtype))
        ranked.append(request.rank(depth + 1, logits_BPV))
    return Proposal(nodes_BM, tuple(ranked))
