"""Greedy and sampled acceptance: lossless, token for token.

A node's *target token* is the token that plain decoding would emit after it: the verifier's argmax, or,
when sampling, argmax(filtered(logits / T) + g). A draft is accepted if it is its parent's target token,
and the bonus token is the target token of the deepest accepted node.
"""

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.decoding.acceptance.rule import Accepted, Rule, Verified, walk
from medusa_jax.decoding.sampling import Sampling, best_token, filtered, gumbel
from medusa_jax.tree.tree import Nodes


def target_tokens(
    logits_BMV: jax.Array,
    positions_BM: jax.Array,
    sampling: Sampling | None,
    by_depth: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """The token that plain decoding emits after each node: [B, M].

    Args:
      logits_BMV: the verifier's logits at each node.
      positions_BM: absolute position of each node; its target token is at the next position.
      sampling: None is greedy; else argmax(filtered(logits / T) + g[position + 1]), without noise in
        rows of temperature 0.
      by_depth: optionally the noise by depth [B, L, V] and each node's depth [M]: nodes of one depth
        share their position and noise.
    """
    if sampling is None:
        return best_token(logits_BMV)

    def draw() -> jax.Array:
        if by_depth is None:
            V, dtype = logits_BMV.shape[-1], logits_BMV.dtype
            noise = gumbel(sampling.key_B, positions_BM + 1, V, dtype)
        else:
            noise = jnp.take(by_depth[0], by_depth[1], axis=1)
        noise = jnp.where((sampling.temperature_B > 0)[:, None, None], noise, 0)
        return best_token(filtered(logits_BMV, sampling) + noise)

    # A server runs greedy rows with this program, too: they need no filters and no noise.
    return lax.cond(_any_sampled(sampling), draw, lambda: best_token(logits_BMV))


def _any_sampled(sampling: Sampling) -> jax.Array:
    return jnp.any(sampling.temperature_B > 0)


def _noise(
    sampling: Sampling, positions_BL: jax.Array, vocab_size: int, dtype
) -> jax.Array:
    """Gumbel noise, which is not drawn where every row has temperature 0."""
    return lax.cond(
        _any_sampled(sampling),
        lambda: gumbel(sampling.key_B, positions_BL, vocab_size, dtype),
        lambda: jnp.zeros((*positions_BL.shape, vocab_size), dtype),
    )


def accept_targets(nodes_BM: jax.Array, targets_BM: jax.Array, tree: Nodes) -> Accepted:
    """Greedy and sampled acceptance: a draft must be its parent's target token."""
    wanted_BM = jnp.take(targets_BM, jnp.asarray(tree.parent_M), axis=1)
    path_BL, n_B, best_B = walk(nodes_BM == wanted_BM, tree)
    return Accepted(path_BL, n_B, jnp.take_along_axis(targets_BM, best_B[:, None], 1)[:, 0])


def _greedy(v: Verified) -> Accepted:
    targets_BM = target_tokens(v.logits_BMV, v.positions_BM, None)
    return accept_targets(v.drafts.nodes_BM, targets_BM, v.drafts.tree)


def _sampled(v: Verified) -> Accepted:
    noise_BLV, tree = v.drafts.noise_BLV, v.drafts.tree
    assert noise_BLV is not None
    by_depth = (noise_BLV, jnp.asarray(tree.depth_M))
    targets_BM = target_tokens(v.logits_BMV, v.positions_BM, v.sampling, by_depth)
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
