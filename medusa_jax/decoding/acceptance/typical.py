"""Typical acceptance (Medusa 2.3.1): lossy."""

import jax.numpy as jnp

from medusa_jax.decoding.acceptance.rule import Accepted, Rule, Verified, walk
from medusa_jax.decoding.sampling import log_target_probs
from medusa_jax.model.kernels import Kernels


def accept_typical(kernels: Kernels, v: Verified) -> Accepted:
    """Typical acceptance (Medusa 2.3.1), lossy.

    A draft x is accepted if p(x) > min(epsilon, delta * exp(-H(p))), where p is the verifier's
    distribution after x's parent, with temperature and filters, and H(p) its entropy in nats. The
    longest path wins, ties go to the larger summed log-probability; the token after it is the most
    likely one. In rows of temperature 0 only the most likely token is accepted: greedy decoding.
    """
    tree, nodes_BM, sampling = v.drafts.tree, v.drafts.nodes_BM, v.sampling
    log_p_BMV = log_target_probs(kernels, v.logits_BMV, sampling)
    p_BMV = jnp.exp(log_p_BMV)
    entropy_BM = -jnp.sum(jnp.where(p_BMV > 0, p_BMV * log_p_BMV, 0), axis=-1)
    epsilon_B1, delta_B1 = (
        x.astype(p_BMV.dtype)[:, None] for x in (sampling.epsilon_B, sampling.delta_B)
    )
    threshold_BM = jnp.minimum(epsilon_B1, delta_B1 * jnp.exp(-entropy_BM))
    parent_M = jnp.asarray(tree.parent_M)
    of_parent_BMV = jnp.take(log_p_BMV, parent_M, axis=1)
    log_p_BM = jnp.take_along_axis(of_parent_BMV, nodes_BM[..., None], axis=-1)[..., 0]
    likely_BM = jnp.exp(log_p_BM) > jnp.take(threshold_BM, parent_M, axis=1)
    # Summed log-probability of the drafts on the path to each node, without the root.
    score_BM = jnp.where((jnp.asarray(tree.depth_M) > 0)[None, :], log_p_BM, 0)
    score_BM = jnp.maximum(score_BM, jnp.finfo(score_BM.dtype).min / (2 * tree.path_length))
    total_BM = jnp.sum(
        jnp.where(jnp.asarray(tree.mask_MM)[None], score_BM[:, None, :], 0), axis=-1
    )
    path_BL, n_B, node_B = walk(likely_BM, tree, total_BM)
    likeliest_BM = kernels.best_token(v.logits_BMV)
    return Accepted(
        path_BL, n_B, jnp.take_along_axis(likeliest_BM, node_B[:, None], 1)[:, 0]
    )


TYPICAL = Rule(
    "typical", False, "LOSSY: not the model's distribution", accept_typical, by_drafts=True
)
