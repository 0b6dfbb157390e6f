"""Greedy and sampled acceptance: lossless, token for token.

A node's *target token* is the token that plain decoding would emit after it: the verifier's argmax, or,
when sampling, argmax(filtered(logits / T) + g). A draft is accepted if it is its parent's target token,
and the bonus token is the target token of the deepest accepted node.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.decoding.acceptance.rule import Accepted, Rule, Verified, walk
from medusa_jax.decoding.copies import Nodes
from medusa_jax.decoding.sampling import Sampling, filtered, gumbel
from medusa_jax.model.kernels import Kernels


def target_tokens(
    kernels: Kernels,
    logits_BMV: jax.Array,
    positions_BM: jax.Array,
    sampling: Sampling | None,
    tree: Nodes | None = None,
) -> jax.Array:
    """The token that plain decoding emits after each node: [B, M].

    Args:
      logits_BMV: the verifier's logits at each node.
      positions_BM: absolute position of each node; its target token is at the next position.
      sampling: None is greedy; else argmax(filtered(logits / T) + g[position + 1]), without noise in
        rows of temperature 0.
      tree: the tree of the nodes, if they are one. Nodes of the same depth have the same position, so noise
        is then drawn once per depth.
    """
    if sampling is None:
        return kernels.best_token(logits_BMV)

    def draw() -> jax.Array:
        at = positions_BM
        if tree is not None:
            at = positions_BM[:, :1] + jnp.arange(tree.path_length)[None, :]
        noise = gumbel(sampling.key_B, at + 1, logits_BMV.shape[-1], logits_BMV.dtype)
        if tree is not None:
            noise = jnp.take(noise, jnp.asarray(tree.depth_M), axis=1)
        noise = jnp.where((sampling.temperature_B > 0)[:, None, None], noise, 0)
        return kernels.best_token(filtered(kernels, logits_BMV, sampling) + noise)

    # A server runs greedy rows with this program, too: they need no filters and no noise.
    sampled = jnp.any(sampling.temperature_B > 0)
    return lax.cond(sampled, draw, lambda: kernels.best_token(logits_BMV))


def _noise(
    sampling: Sampling, positions_BK: jax.Array, tokens: int | jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Gumbel noise, which is not drawn where every row has temperature 0."""
    O = tokens if isinstance(tokens, int) else len(tokens)
    return lax.cond(
        jnp.any(sampling.temperature_B > 0),
        lambda: gumbel(sampling.key_B, positions_BK, tokens, dtype),
        lambda: jnp.zeros((*positions_BK.shape, O), dtype),
    )


def accept_targets(nodes_BM: jax.Array, targets_BM: jax.Array, tree: Nodes) -> Accepted:
    """Greedy and sampled acceptance: a draft must be its parent's target token."""
    target_BM = jnp.take(targets_BM, jnp.asarray(tree.parent_M), axis=1)
    path_BL, n_B, node_B = walk(nodes_BM == target_BM, tree)
    return Accepted(path_BL, n_B, jnp.take_along_axis(targets_BM, node_B[:, None], 1)[:, 0])


# Nodes that agree at the depth reached [B, M], the first of them and the target token after it [B].
Walk = tuple[jax.Array, jax.Array, jax.Array]


def accept_down(kernels: Kernels, v: Verified) -> Accepted:
    """Accept like `accept_targets`, computing target tokens only down the accepted path, one depth at a time
    (`Kernels.path_only`)."""
    tree, nodes_BM = v.drafts.tree, v.drafts.nodes_BM
    parent_M, depth_M = jnp.asarray(tree.parent_M), jnp.asarray(tree.depth_M)

    def down(carry: Walk) -> Walk:
        # Several nodes if a copied token is also drafted: their texts are the same.
        agree_BM, node_B, _ = carry
        first_B = lax.argmax(agree_BM, 1, jnp.int32)
        node_B = jnp.where(jnp.any(agree_BM, axis=1), first_B, node_B)
        logits_B1V = jnp.take_along_axis(v.logits_BMV, node_B[:, None, None], axis=1)
        position_B1 = (v.length_B + depth_M[node_B])[:, None]
        target_B1 = target_tokens(kernels, logits_B1V, position_B1, v.sampling)
        agree_BM = agree_BM[:, parent_M] & (nodes_BM == target_B1) & (depth_M > 0)[None]
        return agree_BM, node_B, target_B1[:, 0]

    root_BM = jnp.broadcast_to((depth_M == 0)[None], nodes_BM.shape)
    zero_B = jnp.zeros_like(nodes_BM[:, 0])
    begin = root_BM, zero_B, zero_B
    _, node_B, bonus_B = lax.while_loop(lambda carry: jnp.any(carry[0]), down, begin)
    return Accepted(jnp.asarray(tree.ancestors_ML)[node_B], depth_M[node_B], bonus_B)


def _greedy(kernels: Kernels, v: Verified) -> Accepted:
    targets_BM = target_tokens(kernels, v.logits_BMV, v.positions_BM, None)
    return accept_targets(v.drafts.nodes_BM, targets_BM, v.drafts.tree)


def _sampled(kernels: Kernels, v: Verified) -> Accepted:
    tree = v.drafts.tree
    if kernels.path_only and tree.n_nodes > 1:
        return accept_down(kernels, v)
    targets_BM = target_tokens(kernels, v.logits_BMV, v.positions_BM, v.sampling, tree)
    return accept_targets(v.drafts.nodes_BM, targets_BM, tree)


GREEDY = Rule(
    "greedy", True, "lossless: the text of plain greedy decoding, token for token", _greedy
)
SAMPLED = Rule(
    "sampled",
    True,
    "lossless: the text of plain sampling with the same seed, token for token",
    _sampled,
    noise=_noise,
)
