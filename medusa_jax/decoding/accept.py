"""Acceptance: which path of the verified tree is kept, and which token follows it.

Every rule sees the verifier's logits at all M nodes. `greedy` and `sampled` are lossless and
share one code path: a node's *target token* is what plain decoding would emit behind it, a
draft is accepted if it is its parent's target token, and the bonus token is the target token
of the deepest accepted node. `rejection` (see rejection.py) is lossless in distribution.
`typical` is lossy (Medusa 2.3.1).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from medusa_jax.decoding.sampling import (
    Sampling,
    best_token,
    filtered,
    gumbel,
    log_target_law,
)
from medusa_jax.tree import Tree

LOSSLESS = {"greedy": True, "sampled": True, "rejection": True, "typical": False}
# What a user may rely on, in the words that outputs use.
GUARANTEE = {
    "greedy": "lossless: the text of plain greedy decoding, token for token",
    "sampled": "lossless: the text of plain sampling with the same seed, token for token",
    "rejection": "lossless in distribution: the law of plain sampling, by other draws",
    "typical": "LOSSY: another distribution than the model's",
}


class Accepted(NamedTuple):
    """The outcome of one verification.

    Attributes:
      path_BL: nodes of the accepted path, root first; entries behind `n_B` repeat its end.
      n_B: accepted drafts, 0 to L - 1 (the root is not counted).
      bonus_B: the token behind the path, chosen by the verifier.
    """

    path_BL: jax.Array
    n_B: jax.Array
    bonus_B: jax.Array


def target_tokens(
    logits_BMV: jax.Array,
    positions_BM: jax.Array,
    sampling: Sampling | None,
    by_depth: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """The token that plain decoding emits behind each node: [B, M].

    Args:
      logits_BMV: the verifier's logits at each node.
      positions_BM: absolute position of each node; its target token sits one further.
      sampling: None is greedy; else argmax(filtered(logits / T) + g[position + 1]), with the
        noise switched off in rows of temperature 0.
      by_depth: optionally the noise by depth [B, L, V] and each node's depth [M]: nodes of one
        depth share a position and so their noise.
    """
    if sampling is None:
        return best_token(logits_BMV)
    if by_depth is None:
        noise = gumbel(
            sampling.key_B, positions_BM + 1, logits_BMV.shape[-1], logits_BMV.dtype
        )
    else:
        noise = jnp.take(by_depth[0], by_depth[1], axis=1)
    noise = jnp.where((sampling.temperature_B > 0)[:, None, None], noise, 0)
    return best_token(filtered(logits_BMV, sampling) + noise)


def walk(matched_BM: jax.Array, tree: Tree, tie_break_BM: jax.Array | None = None):
    """The longest path whose nodes all match: (path_BL, n_B, deepest node_B).

    A node is accepted if it and all its ancestors match; the root always does. Among equally
    deep accepted nodes the one with the largest `tie_break_BM` wins, else the first.

    Example: the tree of `Tree`'s docstring, matched = [.., yes, no, no, yes]: node 4 (path
    [0, 2]) is the deepest accepted one, path [0, 1, 4], n = 2.
    """
    is_root_M = jnp.asarray(tree.depth_M) == 0
    failed_BM = ~matched_BM & ~is_root_M[None, :]
    # accepted[v] = no failed node among v's ancestors and itself
    accepted_BM = ~jnp.any(jnp.asarray(tree.mask_MM)[None] & failed_BM[:, None, :], axis=-1)
    depth_BM = jnp.where(accepted_BM, jnp.asarray(tree.depth_M)[None, :], -1)
    if tie_break_BM is None:
        best_B = jnp.argmax(depth_BM, axis=-1)
    else:
        longest_BM = depth_BM == jnp.max(depth_BM, axis=-1, keepdims=True)
        best_B = jnp.argmax(jnp.where(longest_BM, tie_break_BM, -jnp.inf), axis=-1)
    path_BL = jnp.take(jnp.asarray(tree.ancestors_ML), best_B, axis=0)
    return path_BL, jnp.take(jnp.asarray(tree.depth_M), best_B), best_B


def accept_targets(nodes_BM: jax.Array, targets_BM: jax.Array, tree: Tree) -> Accepted:
    """Greedy and sampled acceptance: a draft must be its parent's target token."""
    wanted_BM = jnp.take(targets_BM, jnp.asarray(tree.parent_M), axis=1)
    path_BL, n_B, best_B = walk(nodes_BM == wanted_BM, tree)
    return Accepted(path_BL, n_B, jnp.take_along_axis(targets_BM, best_B[:, None], 1)[:, 0])


def accept_typical(
    nodes_BM: jax.Array,
    logits_BMV: jax.Array,
    tree: Tree,
    sampling: Sampling,
) -> Accepted:
    """Typical acceptance (Medusa 2.3.1), lossy.

    A draft x passes if p(x) > min(epsilon, delta * exp(-H(p))), p the verifier's distribution
    behind its parent after temperature and filters, H its entropy in nats. The longest path
    wins, ties by summed log-probability; the token behind it is the most likely one. Rows of
    temperature 0 let only the likeliest token pass: greedy decoding.
    """
    log_p_BMV = log_target_law(logits_BMV, sampling)
    p_BMV = jnp.exp(log_p_BMV)
    entropy_BM = -jnp.sum(jnp.where(p_BMV > 0, p_BMV * log_p_BMV, 0), axis=-1)
    epsilon_B1, delta_B1 = (
        jnp.broadcast_to(jnp.asarray(x, p_BMV.dtype), nodes_BM.shape[:1])[:, None]
        for x in (sampling.epsilon_B, sampling.delta_B)
    )
    threshold_BM = jnp.minimum(epsilon_B1, delta_B1 * jnp.exp(-entropy_BM))
    parent_M = jnp.asarray(tree.parent_M)
    behind_BMV = jnp.take(log_p_BMV, parent_M, axis=1)
    log_p_BM = jnp.take_along_axis(behind_BMV, nodes_BM[..., None], axis=-1)[..., 0]
    passed_BM = jnp.exp(log_p_BM) > jnp.take(threshold_BM, parent_M, axis=1)
    # Summed log-probability of the drafts on the way to each node (the root adds nothing).
    own_BM = jnp.where((jnp.asarray(tree.depth_M) > 0)[None, :], log_p_BM, 0)
    own_BM = jnp.maximum(own_BM, jnp.finfo(own_BM.dtype).min / (2 * tree.path_length))
    total_BM = jnp.sum(
        jnp.where(jnp.asarray(tree.mask_MM)[None], own_BM[:, None, :], 0), axis=-1
    )
    path_BL, n_B, best_B = walk(passed_BM, tree, total_BM)
    likeliest_BM = best_token(logits_BMV)
    return Accepted(
        path_BL, n_B, jnp.take_along_axis(likeliest_BM, best_B[:, None], 1)[:, 0]
    )
