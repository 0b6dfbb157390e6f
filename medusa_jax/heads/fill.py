"""Fill the nodes of a tree from logits, all at once or level by level."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.heads.drafter import DraftRequest, Proposal, Ranked
from medusa_jax.model.backbone import Backbone
from medusa_jax.sharding import PyTree
from medusa_jax.tree.tree import Tree


def best_tokens(backbone: Backbone, scores: jax.Array, n: int) -> jax.Array:
    """Ids of the n best guesses [..., n] by scores [..., O]. Drafts that scores rank come from here."""
    # A TPU sorts all scores of an array of more than two axes.
    best = backbone.kernels.top_k(scores.reshape(-1, scores.shape[-1]), n)
    return backbone.ids_of(best.reshape(*scores.shape[:-1], n))


def fill_by_rank(
    request: DraftRequest, backbone: Backbone, logits: Sequence[jax.Array]
) -> Proposal:
    """Fill the tree with guesses that do not depend on the path.

    Rank r of depth d is the (r+1)-th best guess of head d on every path.

    Args:
      logits: logits of the first `tree.depth` heads, each [B, O].
    """
    root_B, tree, rank = request
    if tree.depth == 0:
        return Proposal(root_B[:, None])
    ranked = tuple(rank(k + 1, logits_BO) for k, logits_BO in enumerate(logits))
    scores_BKO = jnp.stack([depth.scores for depth in ranked], axis=1)
    best_BKR = best_tokens(backbone, scores_BKO, tree.max_rank + 1)
    # A gather by constants; slices of the top-k result would compile to a full sort.
    depth_M = jnp.maximum(jnp.asarray(tree.depth_M) - 1, 0)
    drafts_BM = best_BKR[:, depth_M, jnp.asarray(tree.rank_M)]
    is_root_M = jnp.asarray(tree.depth_M) == 0
    return Proposal(jnp.where(is_root_M[None, :], root_B[:, None], drafts_BM), ranked)


@dataclass(frozen=True)
class Level:
    """Constants of one step down the tree, from depth d to depth d + 1.

    At depth d only nodes with children matter, here called parents. Example: depth 1 of the
    tree [0] [1] [2] [0,0] [2,0] [2,1] has the parents [0] and [2], both children of the root:

      nodes_P   0 2      place among all nodes of depth d
      rows_P    0 0      place of the node's parent among the parents of depth d - 1
      parent_C  0 1 1    for each node of depth d + 1: place of its parent among the parents
      rank_C    0 0 1    and its rank

    mask_PR has a row for each parent, and a column for the root and every parent so far: True for the row's
    ancestors and itself.
    """

    nodes_P: np.ndarray
    rows_P: np.ndarray
    parent_C: np.ndarray
    rank_C: np.ndarray
    mask_PR: np.ndarray

    @classmethod
    def of(cls, tree: Tree) -> "list[Level]":
        """One level for each depth that has children."""
        levels, above_R = [], np.zeros(0, int)
        parents_M = np.array([0])  # the parents of the previous depth, as nodes of the tree
        for depth in range(tree.depth):
            nodes, children = tree.level(depth), tree.level(depth + 1)
            parents = tree.parents(depth)
            above_R = np.concatenate([above_R, parents])
            levels.append(
                cls(
                    np.searchsorted(nodes, parents),
                    np.searchsorted(parents_M, tree.parent_M[parents]),
                    np.searchsorted(parents, tree.parent_M[children]),
                    tree.rank_M[children],
                    tree.mask_MM[parents][:, above_R],
                )
            )
            parents_M = parents
        return levels


# (depth, constants, tokens of its parents [B, P], carry) -> (logits of their children [B, P, O], new
# carry).
LogitsOf = Callable[[int, Level, jax.Array, PyTree], tuple[jax.Array, PyTree]]


def fill_by_level(
    request: DraftRequest, backbone: Backbone, logits_of: LogitsOf, carry: PyTree
) -> Proposal:
    """Fill the tree with guesses that depend on the path.

    Rows of a level are gathered from the level above by constants, so shapes are static, without a
    loop over nodes.

    Args:
      backbone: maps logits to tokens.
      carry: the carry of `logits_of` at the root.
    """
    root_B, tree, rank = request
    tokens, ranked = [root_B[:, None]], list[Ranked]()  # per depth, of all its nodes
    for depth, level in enumerate(Level.of(tree)):
        parents_BP = tokens[-1][:, level.nodes_P]
        logits_BPO, carry = logits_of(depth, level, parents_BP, carry)
        ranked.append(rank(depth + 1, logits_BPO))
        best_BPR = best_tokens(backbone, ranked[-1].scores, int(level.rank_C.max()) + 1)
        tokens.append(best_BPR[:, level.parent_C, level.rank_C].astype(root_B.dtype))
    return Proposal(jnp.concatenate(tokens, axis=1), tuple(ranked))
