"""Medusa's equation 1 as written: the reference for the streamed loss, in tests and timing."""

import jax
import jax.numpy as jnp

from medusa_jax.heads import Backbone
from medusa_jax.heads.drafter import TextRows
from medusa_jax.heads.layers import shift_left
from medusa_jax.sharding import PyTree
from medusa_jax.training.losses.objectives import HeadObjective, hidden_states
from medusa_jax.training.losses.targets import Batch, pair_mask, rows


def equation_1(
    params: PyTree, backbone: Backbone, objective: HeadObjective, batch: Batch
) -> jax.Array:
    """L = sum_k lambda_k L_k, L_k = -log p_t^(k)(y_{t+k+1}), with the logits of all heads at once.

    The same value as `objectives.head_loss` with labels only, but with K x B x T x V logits in memory.
    """
    drafter = objective.drafter
    hidden_BTD = jax.lax.stop_gradient(hidden_states(backbone, batch))
    features_KBTD = drafter.features(params, backbone, TextRows(hidden_BTD, *rows(batch)))
    offsets = range(2, drafter.n_heads + 2)
    labels = [shift_left(batch["tokens"], a) for a in offsets]
    masks = [pair_mask(batch["counted"], batch["segment_ids"], a) for a in offsets]
    labels_KBT, mask_KBT = jnp.stack(labels), jnp.stack(masks)
    logits_KBTV = jnp.stack(
        [drafter.head_logits(params, backbone, k, f) for k, f in enumerate(features_KBTD)]
    )
    logp_KBTV = jax.nn.log_softmax(logits_KBTV)
    nll_KBT = -jnp.take_along_axis(logp_KBTV, labels_KBT[..., None], axis=-1)[..., 0]
    count_K = jnp.maximum(jnp.sum(mask_KBT, axis=(1, 2)), 1)
    loss_K = jnp.sum(nll_KBT * mask_KBT, axis=(1, 2)) / count_K
    lambda_K = jnp.array([objective.lambda_k(k) for k in range(1, drafter.n_heads + 1)])
    return jnp.sum(loss_K * lambda_K)
