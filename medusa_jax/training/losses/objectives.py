"""Next-token and draft-head losses: their terms, the weights and the normalisation.

The sums are computed chunk by chunk in `streamed.py`; `training/stage.py` adds the two losses of a stage.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from medusa_jax.config import TrainConfig
from medusa_jax.heads.drafter import Backbone, Drafter, TextRows, shift_left
from medusa_jax.model.barrier import regather
from medusa_jax.model.product import at_least_f32
from medusa_jax.sharding import PyTree
from medusa_jax.training.losses import Batch, StepInputs, Sums, delay, pair_mask, rows
from medusa_jax.training.losses.packing import columns
from medusa_jax.training.losses.streamed import Teacher, heads_cross_entropy

# Variables -> (head parameters, the backbone of the heads).
Split = Callable[[PyTree], tuple[PyTree, Backbone]]


def next_token_loss(
    params: PyTree,
    backbone_of: Callable[[PyTree], Backbone],
    hidden_BTD: jax.Array,
    inputs: StepInputs,
    chunk: int,
    original: Backbone | None = None,
) -> tuple[jax.Array, Sums]:
    """L_LM of the backbone's hidden states [B, T, D]: the mean over all tokens that have a loss.

    If `original`, the backbone before training, is given, L_LM is the KL divergence from its distribution
    (Medusa 2.3.2), else the cross-entropy of the text. Counts are `pair_counts(batch, (1, ...))`.

    Returns: L_LM, and the sums (leading axis of size 1).
    """
    batch, teacher, teacher_BTD = inputs.batch, None, None
    if original is not None:
        teacher = Teacher(original.lm_head, 1.0, 0.0)
        done = lax.stop_gradient(hidden_BTD)
        weights = regather(original.params, done, original.llama.mesh)
        original = dataclasses.replace(original, params=weights)
        teacher_BTD = original.forward(*rows(batch))

    def logits(p: PyTree, hidden: jax.Array) -> jax.Array:
        return backbone_of(p).lm_head(hidden)

    mask_BT = pair_mask(batch["counted"], batch["segment_ids"], 1)
    total, sums = heads_cross_entropy(
        [logits], params, jnp.ones((1,)), [hidden_BTD], shift_left(batch["tokens"], 1), [mask_BT],
        chunk, teacher, teacher_BTD, mesh_to_split(backbone_of(params)),
    )  # fmt: skip
    return next_token_mean(total, sums.entropy[0], inputs.counts_K[0]), sums


def next_token_mean(loss: jax.Array, entropy: jax.Array, count: jax.Array) -> jax.Array:
    """L_LM from its sums."""
    return (loss - entropy) / jnp.maximum(count, 1.0)


def mesh_to_split(backbone: Backbone) -> Mesh | None:
    """The mesh over which the rows of a loss through this LM head are split (`RowSplit`).

    None if its adapter has dropout, whose random numbers depend on the index among all rows. Without a
    split every chunk sums gradients over devices, which is cheap for an adapter.
    """
    adapter = (backbone.lora or {}).get("lm_head", {})
    return None if "seed" in adapter else backbone.llama.mesh


def heads_loss(
    params: PyTree,
    split: Split,
    hidden_BTE: jax.Array,
    drafter: Drafter,
    train: TrainConfig,
    inputs: StepInputs,
) -> tuple[jax.Array, Sums]:
    """sum_k lambda_k L_k (Medusa 2.2.1, equation 1), each L_k averaged over the head's counted pairs.

    k is 1-based as in the paper, lambda_k = lambda_decay^k, and head k predicts k + 1 tokens ahead. L_k is the sum of

        label_weight       x cross-entropy with the text
        teacher_weight     x cross-entropy with the backbone's distribution (Hydra 6.1, Amphista eq. 7-9)
        distance_weight    x L1 distance from the backbone's distribution (DSpark)
        confidence_weight  x binary cross-entropy of the confidence, whose input is detached, with 1 - L1 / 2 (DSpark)
        feature_weight     x smooth L1 between the head's features and the backbone's hidden state (EAGLE)

    With `hidden_noise` (Hydra 6.1) the heads read hidden states plus uniform(-1, 1) noise / sqrt(L d) in training.
    `induction_weight`: see `induction.py`.

    Column t of every array is the prediction of token t, so all heads share one label and one teacher per
    column; at drawn anchors (`draw_anchors`) each head has its own. If the label is outside the draft
    vocabulary, the pair counts as a miss and adds only the feature term.

    Args:
      split: returns head parameters and the heads' backbone. A draft vocabulary limits its LM head, and
        hence the teacher's distribution (`heads/vocabulary.py`).
      drafter: as `Drafter.loss_view` returns it.
      inputs: counts are `pair_counts(batch, 2 ... K+1)`.

    Returns: the loss, and the sums per head, each [K].
    """
    batch = inputs.batch
    heads, backbone = split(params)
    read_BTE, dropout_key = hidden_BTE, inputs.dropout_key
    if train.hidden_noise and dropout_key is not None:
        dropout_key, noise_key = jax.random.split(dropout_key)
        read_BTE += hidden_noise(noise_key, hidden_BTE, train.hidden_noise)
    text = TextRows(read_BTE, *rows(batch), dropout_key)
    index_BA = batch.get("anchors")
    if index_BA is None:
        features_KBTD = drafter.features(heads, backbone, text)
    else:
        features_KBTD = drafter.features_at(heads, backbone, text, index_BA)
    teacher, weight, D = None, train.label_weight, backbone.llama.config.d_model
    before_BTD = lax.stop_gradient(delay(hidden_BTE[..., :D], 1))  # just before the target
    if train.teacher_weight or train.distance_weight or train.confidence_weight:
        frozen: Backbone = lax.stop_gradient(backbone)
        teacher = Teacher(
            frozen.lm_head, train.teacher_weight, train.label_weight, train.distance_weight,
            train.confidence_weight,
        )  # fmt: skip
        weight = 1.0  # `Teacher` weights all terms
    label_BT, T = backbone.places(batch["tokens"]), batch["tokens"].shape[1]
    scored_BT = label_BT < backbone.outputs
    label_BT = jnp.where(scored_BT, label_BT, 0)
    own = drafter.heads.lm_head != "shared"
    mesh = backbone.llama.mesh if own else mesh_to_split(backbone)
    logits_K, features_K, mask_K, weight_K, sums_K = [], [], [], [], []
    count_K = jnp.maximum(inputs.counts_K, 1.0).astype(at_least_f32(hidden_BTE.dtype))
    further = jnp.zeros((), count_K.dtype)
    if train.induction_weight:
        layer = induction().queries_keys(drafter, heads, backbone, text)
        pairs_BT = pair_mask(batch["counted"], batch["segment_ids"], 2)
        pairs_BT &= shift_left(scored_BT, 2)
        share = train.lambda_decay / count_K[0]
        found = induction().induction_sum(*layer, batch, pairs_BT)
        further += train.induction_weight * share * found
    for k in range(drafter.n_heads):

        def logits(p: PyTree, features: jax.Array, k: int = k) -> PyTree:
            heads, backbone = split(p)
            scores = drafter.head_logits(heads, backbone, k, features)
            if not train.confidence_weight:
                return scores
            return scores, drafter.confidence(heads, lax.stop_gradient(features))

        ahead = k + 2
        mask_BT = pair_mask(batch["counted"], batch["segment_ids"], ahead)
        share = train.lambda_decay ** (k + 1) / count_K[k]
        if index_BA is None:
            features, mask = delay(features_KBTD[k], ahead), delay(mask_BT, ahead)
            before = before_BTD
        else:
            at_BA = jnp.minimum(index_BA + ahead, T - 1)
            features, mask = features_KBTD[k], columns(mask_BT, index_BA)
            before = columns(before_BTD, at_BA)
        if train.feature_weight:
            distance = feature_sum(features[..., :D], before, mask)
            further += train.feature_weight * share * distance
        if index_BA is not None:
            of_head, sums = heads_cross_entropy(
                [logits], params, weight * share[None], [features], columns(label_BT, at_BA),
                [mask & columns(scored_BT, at_BA)], train.loss_chunk, teacher,
                before if teacher else None, mesh,
            )  # fmt: skip
            further += of_head
            sums_K.append(sums)
            continue
        logits_K.append(logits)
        features_K.append(features)
        mask_K.append(mask & scored_BT)
        weight_K.append(weight * share)
    if index_BA is not None:
        return further, jax.tree.map(lambda *s: jnp.concatenate(s), *sums_K)
    loss, sums = heads_cross_entropy(
        logits_K, params, jnp.stack(weight_K), features_K, label_BT, mask_K, train.loss_chunk,
        teacher, before_BTD if teacher else None, mesh,
    )  # fmt: skip
    return loss + further, sums


def induction() -> Any:
    """Seam: `train.induction_weight` asks for this term."""
    return importlib.import_module("medusa_jax.training.losses.induction")


def feature_sum(
    features_BTD: jax.Array, hidden_BTD: jax.Array, mask_BT: jax.Array
) -> jax.Array:
    """Smooth L1 between features and hidden states: mean over D, summed over pairs."""
    wide = at_least_f32(features_BTD.dtype)
    loss_BTD = optax.losses.huber_loss(features_BTD.astype(wide), hidden_BTD.astype(wide))
    return jnp.sum(jnp.where(mask_BT, jnp.mean(loss_BTD, axis=-1), 0.0))


def hidden_noise(key: jax.Array, hidden_BTD: jax.Array, alpha: float) -> jax.Array:
    """uniform(-1, 1) alpha / sqrt(L d) (Hydra 6.1, after Jain et al. 2024)."""
    scale = alpha / math.sqrt(hidden_BTD.shape[1] * hidden_BTD.shape[2])
    return scale * jax.random.uniform(key, hidden_BTD.shape, hidden_BTD.dtype, -1, 1)


def hidden_states(backbone: Backbone, batch: Batch) -> jax.Array:
    """[B, T, E] of a frozen backbone: from the batch if cached, otherwise computed."""
    if "hidden" in batch:  # seam: chosen by `data.cache_features`
        store = importlib.import_module("medusa_jax.training.data.hidden_store")
        states_BTE: jax.Array = store.decode(
            batch["hidden"], backbone.llama.config.d_model, backbone.llama.dtype
        )
        return states_BTE
    return backbone.forward(*rows(batch))
