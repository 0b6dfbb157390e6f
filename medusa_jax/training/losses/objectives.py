"""Next-token and draft-head losses: their terms, the weights and the normalisation.

The sums are computed chunk by chunk in `streamed.py`; `training/stage.py` adds the two losses of a stage.
"""

import dataclasses
import math
from collections.abc import Collection
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from medusa_jax.config import TrainConfig
from medusa_jax.heads.drafter import Drafter, TextRows, shift_left
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.barrier import regather
from medusa_jax.model.product import at_least_f32
from medusa_jax.sharding import Params, split_rows
from medusa_jax.training.data import hidden_store
from medusa_jax.training.losses.induction import induction_loss
from medusa_jax.training.losses.lm_heads import (
    Head,
    HeadArrays,
    HeadReads,
    backbone_logits,
    head_logits,
)
from medusa_jax.training.losses.packing import LossColumns, RowSplit
from medusa_jax.training.losses.pairs import Batch, StepInputs, Sums, pair_mask, text_of
from medusa_jax.training.losses.streamed import LossPlan, streamed_loss
from medusa_jax.training.losses.targets import HeadTargets, head_targets
from medusa_jax.training.losses.terms import OF_TEACHER, TERMS, masked_sum


def next_token_loss(
    backbone: Backbone,
    hidden_BTD: jax.Array,
    inputs: StepInputs,
    chunk: int,
    groups: Collection[str],
    original: Backbone | None = None,
) -> tuple[jax.Array, Sums]:
    """L_LM of the backbone's hidden states [B, T, D]: the mean over all tokens that have a loss.

    If `original`, the backbone before training, is given, L_LM is the KL divergence from its distribution
    (Medusa 2.3.2), else the cross-entropy of the text. Counts are `pair_counts(batch, (1, ...))`.

    Args:
      groups: the trained groups of variables.

    Returns: L_LM, and the sums (leading axis of size 1).
    """
    batch, mesh = inputs.batch, mesh_to_split(backbone)
    arrays, weights = HeadArrays(groups), {"label": 1.0}
    logits = partial(backbone_logits, backbone.llama)
    head = arrays.add(logits, HeadReads.of_backbone(backbone))
    teacher: Head | None = None
    teacher_BTD: jax.Array | None = None
    if original is not None:
        teacher = teacher_of(original, arrays)
        weights = {"teacher": 1.0}
        computed = lax.stop_gradient(hidden_BTD)
        params = regather(original.params, computed, original.llama.mesh)
        forward = dataclasses.replace(original, params=params).forward(*text_of(batch))
        teacher_BTD = split_rows(mesh, lax.stop_gradient(forward))
    columns = LossColumns(
        features_K=(split_rows(mesh, hidden_BTD),),
        labels_BT=shift_left(batch["tokens"], 1),
        mask_K=(pair_mask(batch["counted"], batch["segment_ids"], 1),),
        teacher_BTD=teacher_BTD,
    )
    split = RowSplit.of(mesh, len(hidden_BTD))
    plan = LossPlan([head], teacher, weights, arrays.specs, split, chunk)
    total, sums = streamed_loss(plan, arrays.arrays, jnp.ones((1,)), columns)
    return next_token_mean(total, sums.entropy[0], inputs.counts_K[0]), sums


def next_token_mean(loss: jax.Array, entropy: jax.Array, count: jax.Array) -> jax.Array:
    return (loss - entropy) / jnp.maximum(count, 1.0)


def teacher_of(backbone: Backbone, arrays: HeadArrays) -> Head:
    """The LM head of a teacher, without gradient."""
    reads: HeadReads = lax.stop_gradient(HeadReads.of_backbone(backbone))
    frozen_arrays = HeadArrays((), arrays.arrays)
    return frozen_arrays.add(partial(backbone_logits, backbone.llama), reads)


def mesh_to_split(backbone: Backbone) -> Mesh | None:
    """The mesh over which the rows of a loss through this LM head are split (`RowSplit`).

    None if its adapter has dropout, whose random numbers depend on the index among all rows. Without a
    split every chunk sums gradients over devices, which is cheap for an adapter.
    """
    adapter = (backbone.lora or {}).get("lm_head", {})
    return None if "seed" in adapter else backbone.llama.mesh


def heads_loss(
    drafter: Drafter,
    params: Params,
    backbone: Backbone,
    hidden_BTE: jax.Array,
    train: TrainConfig,
    inputs: StepInputs,
    groups: Collection[str] = ("heads",),
) -> tuple[jax.Array, Sums]:
    """sum_k lambda_k L_k (Medusa 2.2.1, equation 1), each L_k averaged over the head's counted pairs.

    k is 1-based as in the paper, lambda_k = lambda_decay^k, and head k predicts k + 1 tokens ahead. L_k is the sum of

        label_weight       x cross-entropy with the text
        teacher_weight     x cross-entropy with the backbone's distribution (Hydra 6.1, Amphista eq. 7-9)
        distance_weight    x L1 distance from the backbone's distribution (DSpark)
        confidence_weight  x binary cross-entropy of the confidence with 1 - L1 / 2 (DSpark); the input of the
                             confidence is detached unless `confidence_gradient`
        feature_weight     x smooth L1 between the head's features and the backbone's hidden state (EAGLE)

    With `hidden_noise` (Hydra 6.1) the heads read hidden states plus uniform(-1, 1) noise / sqrt(L d) in training.
    `induction_weight`: see `induction.py`.

    If the label is outside the draft vocabulary, the pair counts as a miss and adds only the feature term.

    Args:
      drafter: as `optional.loss_view` returns it.
      params: its parameters.
      backbone: the heads' backbone. A draft vocabulary limits its LM head, and hence the teacher's
        distribution (`heads/vocabulary.py`).
      inputs: counts are `pair_counts(batch, 2 ... K+1)`.
      groups: the trained groups of variables.

    Returns: the loss, and the sums per head, each [K].
    """
    batch, dropout_key = inputs.batch, inputs.dropout_key
    input_BTE = hidden_BTE
    if train.hidden_noise and dropout_key is not None:
        dropout_key, noise_key = jax.random.split(dropout_key)
        input_BTE += hidden_noise(noise_key, hidden_BTE, train.hidden_noise)
    text = TextRows(input_BTE, *text_of(batch), dropout_key)
    targets = head_targets(drafter, params, backbone, text, hidden_BTE, batch)
    lambda_K = [train.lambda_decay ** (k + 1) for k in range(drafter.n_heads)]
    count_K = jnp.maximum(inputs.counts_K, 1.0).astype(at_least_f32(hidden_BTE.dtype))
    all_weights = {name: getattr(train, f"{name}_weight") for name in TERMS}
    weights = {name: weight for name, weight in all_weights.items() if weight}
    reads_teacher = not OF_TEACHER.isdisjoint(weights)
    mesh = mesh_to_split(backbone)
    if drafter.heads.lm_head != "shared":
        mesh = backbone.llama.mesh

    loss = jnp.zeros((), count_K.dtype)
    if train.induction_weight:
        share = train.induction_weight * train.lambda_decay / count_K[0]
        loss += share * induction_loss(drafter, params, backbone, text, batch)
    sums_K = []
    for group in targets:
        weight_K = jnp.stack([lambda_K[k] / count_K[k] for k in group.heads])
        if train.feature_weight:
            loss += train.feature_weight * jnp.sum(weight_K * feature_sums(group))
        arrays = HeadArrays(groups)
        heads = []
        for k in group.heads:
            logits = partial(head_logits, backbone.llama, drafter, k, train)
            reads = HeadReads.of_head(drafter, params, backbone, k)
            heads.append(arrays.add(logits, reads))
        teacher = teacher_of(backbone, arrays) if reads_teacher else None
        split = RowSplit.of(mesh, len(group.labels_BT))
        plan = LossPlan(heads, teacher, weights, arrays.specs, split, train.loss_chunk)
        columns = group.columns(mesh, reads_teacher)
        group_loss, sums = streamed_loss(plan, arrays.arrays, weight_K, columns)
        loss += group_loss
        sums_K.append(sums)
    return loss, jax.tree.map(lambda *s: jnp.concatenate(s), *sums_K)


def feature_sums(targets: HeadTargets) -> jax.Array:
    """Smooth L1 between features and hidden states: mean over D, summed over pairs, for each head [K]."""
    sums, D = [], targets.before_BTD.shape[-1]
    for features, pairs_BT in zip(targets.features_K, targets.pairs_K, strict=True):
        dtype = at_least_f32(features.dtype)
        features_BTD, before_BTD = (
            x.astype(dtype) for x in (features[..., :D], targets.before_BTD)
        )
        loss_BTD = optax.losses.huber_loss(features_BTD, before_BTD)
        sums.append(masked_sum(jnp.mean(loss_BTD, axis=-1), pairs_BT))
    return jnp.stack(sums)


def hidden_noise(key: jax.Array, hidden_BTD: jax.Array, alpha: float) -> jax.Array:
    """uniform(-1, 1) alpha / sqrt(L d) (Hydra 6.1, after Jain et al. 2024)."""
    scale = alpha / math.sqrt(hidden_BTD.shape[1] * hidden_BTD.shape[2])
    return scale * jax.random.uniform(key, hidden_BTD.shape, hidden_BTD.dtype, -1, 1)


def hidden_states(backbone: Backbone, batch: Batch) -> jax.Array:
    """[B, T, E] of a frozen backbone: from the batch if cached, otherwise computed."""
    if "hidden" not in batch:
        return backbone.forward(*text_of(batch))
    config, dtype = backbone.llama.config, backbone.llama.dtype
    states_BTE: jax.Array = hidden_store.decode(batch["hidden"], config.d_model, dtype)
    return states_BTE
