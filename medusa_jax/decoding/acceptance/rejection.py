"""Recursive rejection sampling on a tree, the baseline of papers: lossless in distribution.

Siblings are drawn without replacement from the head's distribution q: the order of
logits / T + Gumbel noise is such a draw (Gumbel-top-k). In that order they are tested
against the verifier's distribution p (Leviathan et al. 2023 for one draft; EAGLE 1 and
Sequoia for several):

    g = p; h = q
    for x in the siblings, in order:
        accept x if u h(x) < g(x), u uniform
        else  g = norm(max(g - h, 0));  h(x) = 0;  h = norm(h)
    none accepted: the next token is a sample of g

The resulting token is distributed as p. Compared with sample-then-match (`accept_targets`) the
distribution is the same, but the draws differ and depend on the tree and the drafter.

Noise depends on the request and the absolute position, so other rows of the batch do not
influence it. All nodes of a depth share the noise for their children. This is safe: a step
visits one node per depth, and the next step starts where the noise is still unused.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.decoding.acceptance.rule import Accepted, Rule, Verified
from medusa_jax.decoding.sampling import Sampling, gumbel, log_target_probs
from medusa_jax.heads.drafter import Ranked
from medusa_jax.model.kernels import Kernels
from medusa_jax.tree.tree import Tree

# Noise streams of a row in addition to the verifier's, which is keyed by position. Positions stay far
# below 2**31, so the keys cannot collide.
DRAFT, TEST = 2**31, 2**31 + 1


def draft_noise(
    sampling: Sampling, positions_BK: jax.Array, tokens: int | jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Gumbel noise [B, K, O] that orders the drafts at these positions."""
    return gumbel(sampling.stream(DRAFT).key_B, positions_BK, tokens, dtype)


def uniform(key_B: jax.Array, position_B: jax.Array, n: int) -> jax.Array:
    """Uniform numbers in [0, 1) of one absolute position per row: [B, n] float32."""

    def draw(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, position), (n,), jnp.float32)

    return jax.vmap(draw)(key_B, position_B)


def accept_rejection(kernels: Kernels, v: Verified) -> Accepted:
    """Walk down the tree, testing the children of the last accepted node.

    The tree is dense (`Tree.dense`): the j-th child of a node has rank j, and is the j-th draw after it.
    Tokens that the heads do not score have no mass. In rows of temperature 0, p is a point mass: greedy decoding.
    """
    (tree, nodes_BM, ranked, draft_ids_O, _), logits_BMV = v.drafts, v.logits_BMV
    sampling, length_B = v.sampling, v.length_B
    assert isinstance(tree, Tree)
    if tree.dense != tree:
        raise ValueError("rejection needs a tree whose siblings have the ranks 0, 1, ...")
    B, _, V = logits_BMV.shape
    row_B = jnp.arange(B)
    token_V = jnp.arange(V)[None, :]
    children_MC = jnp.asarray(tree.children_MC)
    tests = sampling.stream(TEST)
    # For temperature 0 only p matters, so any positive scale of q will do.
    scale_B1 = jnp.where(sampling.temperature_B > 0, sampling.temperature_B, 1)[:, None]
    node_B = jnp.zeros((B,), jnp.int32)
    active_B = jnp.ones((B,), bool)
    log_g_BV = jnp.zeros((B, V), logits_BMV.dtype)

    for depth in range(tree.path_length):
        logits_B1V = logits_BMV[row_B, node_B][:, None]
        log_p_BV = log_target_probs(kernels, logits_B1V, sampling)[:, 0]
        log_g_BV = jnp.where(active_B[:, None], log_p_BV, log_g_BV)
        width = tree.width(depth)
        if width == 0:
            break
        log_q_BV = parents_logits(tree, depth, ranked, node_B)
        if draft_ids_O is not None:
            no_weight_BV = jnp.full((B, V), -jnp.inf, log_q_BV.dtype)
            log_q_BV = no_weight_BV.at[:, draft_ids_O].set(log_q_BV)
        log_q_BV = log_q_BV.astype(log_p_BV.dtype) / scale_B1.astype(log_p_BV.dtype)
        u_BC = uniform(tests.key_B, length_B + depth + 1, tree.children_MC.shape[1])
        u_BC = u_BC.astype(log_p_BV.dtype)
        children_BC = children_MC[node_B]

        def test_child(j, carry, u_BC=u_BC, children_BC=children_BC, running_B=active_B):
            log_g_BV, log_q_BV, accepted_B = carry
            child_B = jnp.take(children_BC, j, axis=1)
            x_B = nodes_BM[row_B, child_B]
            # The root is never a child, so 0 marks "no more children".
            tests_B = running_B & (accepted_B == 0) & (child_B > 0)
            g_BV, h_BV = jnp.exp(log_g_BV), normalised(log_q_BV)
            h_x_B, g_x_B = h_BV[row_B, x_B], g_BV[row_B, x_B]
            u_B = jnp.take(u_BC, j, axis=1)
            accepts_B = tests_B & (h_x_B > 0) & (u_B * h_x_B < g_x_B)
            residual_BV = jnp.maximum(g_BV - h_BV, 0)
            total_B1 = residual_BV.sum(-1, keepdims=True)
            log_residual_BV = jnp.log(residual_BV / jnp.where(total_B1 > 0, total_B1, 1))
            # Skip a draw without mass in q, and the subtraction if rounding leaves no mass in g.
            rejects_B1 = (tests_B & ~accepts_B & (h_x_B > 0))[:, None] & (total_B1 > 0)
            log_g_BV = jnp.where(rejects_B1, log_residual_BV, log_g_BV)
            log_q_BV = jnp.where(token_V == x_B[:, None], -jnp.inf, log_q_BV)
            return log_g_BV, log_q_BV, jnp.where(accepts_B, child_B, accepted_B)

        start = (log_g_BV, log_q_BV, jnp.zeros((B,), jnp.int32))
        log_g_BV, _, accepted_B = lax.fori_loop(0, width, test_child, start)
        active_B &= accepted_B > 0
        node_B = jnp.where(active_B, accepted_B, node_B)

    n_B = jnp.take(jnp.asarray(tree.depth_M), node_B)
    path_BL = jnp.take(jnp.asarray(tree.ancestors_ML), node_B, axis=0)
    # The verifier's noise stream: without drafts this is plain sampling, draw for draw.
    noise_BV = gumbel(sampling.key_B, (length_B + n_B + 1)[:, None], V, log_g_BV.dtype)[
        :, 0
    ]
    return Accepted(path_BL, n_B, kernels.best_token(log_g_BV + noise_BV))


def parents_logits(
    tree: Tree, depth: int, ranked: Sequence[Ranked], node_B: jax.Array
) -> jax.Array:
    """The head's logits [B, O] that the children of each row's node (at `depth`) were drawn from."""
    if depth >= len(ranked):
        raise ValueError(
            f"the drafter did not rank its guesses at depth {depth + 1}: their distribution is unknown"
        )
    logits = ranked[depth].logits
    if logits.ndim == 2:
        return logits
    parents = tree.parents(depth)
    place_M = np.zeros(tree.n_nodes, np.int32)
    place_M[parents] = np.arange(len(parents))
    return logits[jnp.arange(logits.shape[0]), jnp.asarray(place_M)[node_B]]


def normalised(log_weights_BV: jax.Array) -> jax.Array:
    """softmax, or all zeros if every weight is zero."""
    top_B1 = jnp.max(log_weights_BV, axis=-1, keepdims=True)
    weights_BV = jnp.exp(log_weights_BV - jnp.where(jnp.isfinite(top_B1), top_B1, 0))
    total_B1 = weights_BV.sum(-1, keepdims=True)
    return weights_BV / jnp.where(total_B1 > 0, total_B1, 1)


# Drafts use a noise stream independent of the verifier's.
REJECTION = Rule(
    "rejection",
    True,
    "lossless in distribution: that of plain sampling, with different draws",
    accept_rejection,
    noise=draft_noise,
    dense=True,
    by_drafts=True,
)
