"""Losses of heads as written in the papers: the reference for the streamed loss, in tests and timing."""

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.config import TrainConfig
from medusa_jax.heads.autoregressive import Autoregressive
from medusa_jax.heads.drafter import Backbone, Drafter, TextRows, shift_left
from medusa_jax.model.masks import CausalMask
from medusa_jax.sharding import PyTree
from medusa_jax.training.losses import Batch, pair_mask, rows
from medusa_jax.training.losses.objectives import hidden_states


def equation_1(
    params: PyTree, backbone: Backbone, drafter: Drafter, train: TrainConfig, batch: Batch
) -> jax.Array:
    """L = sum_k lambda_k L_k, L_k = -log p_t^(k)(y_{t+k+1}), with the logits of all heads at once.

    The same value as `objectives.heads_loss` over all tokens, but with K x B x T x V logits in memory. The
    teacher's distribution may take part; noise and the regression to hidden states may not.
    """
    hidden_BTE = jax.lax.stop_gradient(hidden_states(backbone, batch))
    features_KBTD = unrolled(drafter, params, backbone, TextRows(hidden_BTE, *rows(batch)))
    offsets = range(2, drafter.n_heads + 2)
    labels = [shift_left(batch["tokens"], a) for a in offsets]
    masks = [pair_mask(batch["counted"], batch["segment_ids"], a) for a in offsets]
    labels_KBT, mask_KBT = jnp.stack(labels), jnp.stack(masks)
    logits_KBTV = jnp.stack(
        [drafter.head_logits(params, backbone, k, f) for k, f in enumerate(features_KBTD)]
    )
    logp_KBTV = jax.nn.log_softmax(logits_KBTV)
    nll_KBT = (
        -train.label_weight
        * jnp.take_along_axis(logp_KBTV, labels_KBT[..., None], axis=-1)[..., 0]
    )
    if train.teacher_weight:
        p_BTV = jax.nn.softmax(jax.lax.stop_gradient(backbone.lm_head(hidden_BTE)))
        p_KBTV = jnp.stack([shift_left(p_BTV, a - 1) for a in offsets])
        nll_KBT -= train.teacher_weight * jnp.sum(p_KBTV * logp_KBTV, axis=-1)
    count_K = jnp.maximum(jnp.sum(mask_KBT, axis=(1, 2)), 1)
    loss_K = jnp.sum(nll_KBT * mask_KBT, axis=(1, 2)) / count_K
    lambda_K = jnp.array([train.lambda_decay**k for k in range(1, drafter.n_heads + 1)])
    return jnp.sum(loss_K * lambda_K)


def unrolled(
    drafter: Drafter, params: PyTree, backbone: Backbone, text: TextRows
) -> jax.Array:
    """`Drafter.features`, but all levels of an autoregressive drafter over whole rows at once.

    Level k attends to the T rows of each of the levels before it under a mask [T, K T], and the backward pass
    keeps all scores, as in the training code of EAGLE-3's authors.
    """
    if not isinstance(drafter, Autoregressive) or drafter.n_heads == 1:
        return drafter.features(params, backbone, text)
    hidden_BTE, tokens_BT, positions_BT, segment_ids_BT, _ = text
    (B, T), K = tokens_BT.shape, drafter.n_heads
    seen_BTT = CausalMask(segment_ids_BT)
    x_BTD, cache = drafter.first_input(params, backbone, hidden_BTE), None
    row_T, slot_R = np.arange(T), np.arange(T * (K - 1))

    def with_room(x_BGTH: jax.Array) -> jax.Array:
        return jnp.pad(x_BGTH, ((0, 0), (0, 0), (0, T * (K - 1)), (0, 0)))

    features = []
    for k in range(K):
        mask: jax.Array | CausalMask = seen_BTT
        start_B = jnp.full((B,), k * T) if k else None
        next_BTD = backbone.embed(shift_left(tokens_BT, k + 1))
        if k:
            own_TR = (row_T[:, None] == slot_R % T) & (slot_R < k * T)
            own_BTR = jnp.broadcast_to(own_TR, (B, *own_TR.shape))
            mask = jnp.concatenate([seen_BTT.visible(0, T, 0, T), own_BTR], axis=-1)
        x_BTD, cache = drafter.run(
            params, backbone, x_BTD, next_BTD.astype(backbone.llama.dtype), positions_BT + k,
            mask, cache, start_B,
        )  # fmt: skip
        if k == 0:
            cache = jax.tree.map(with_room, cache)
        features.append(x_BTD)
    return jnp.stack(features)
