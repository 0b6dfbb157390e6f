"""Next-token and draft-head losses: the weights and normalisation of their terms.

The sums are computed chunk by chunk in `streamed.py`.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from medusa_jax.heads.drafter import Backbone, Drafter, TextRows, shift_left
from medusa_jax.model.barrier import regather
from medusa_jax.model.product import at_least_f32
from medusa_jax.sharding import PyTree
from medusa_jax.training.losses.packing import columns
from medusa_jax.training.losses.streamed import (
    Sums,
    Teacher,
    cross_entropy_sums,
    heads_cross_entropy,
)
from medusa_jax.training.losses.targets import Batch, delay, pair_mask, rows

# Variables -> (head parameters, the backbone of the heads).
Split = Callable[[PyTree], tuple[PyTree, Backbone]]


class HeadTargets(NamedTuple):
    """Terms of a draft head's loss.

    A head's loss is label_weight CE(text) + teacher_weight CE(backbone) + distance_weight L1(backbone) +
    confidence_weight BCE(confidence) + feature_weight smooth-L1. CE(backbone) is against the backbone's distribution for the same token (Hydra
    6.1, Amphista eq. 7-9), L1(backbone) the distance of the two distributions (DSpark), BCE that of a guess's confidence and
    1 - L1 / 2, and smooth-L1 is between the features that the head's logits are computed from and the backbone's hidden
    state there (EAGLE's regression loss). With `noise` (Hydra 6.1) the heads read hidden states plus
    uniform(-1, 1) noise / sqrt(L d) in training. `induction_weight`: see `induction.py`.
    """

    label_weight: float = 1.0
    teacher_weight: float = 0.0
    distance_weight: float = 0.0
    confidence_weight: float = 0.0
    noise: float = 0.0
    feature_weight: float = 0.0
    induction_weight: float = 0.0


class HeadObjective(NamedTuple):
    """The loss of all draft heads, the same at every step.

    Attributes:
      chunk: positions per chunk; the logits of one chunk of one head exist at a time.
      lambda_decay: lambda_k = lambda_decay^k (Medusa 2.2.1: 0.8).
    """

    drafter: Drafter
    chunk: int
    lambda_decay: float
    targets: HeadTargets = HeadTargets()

    def lambda_k(self, k: int) -> float:
        """Weight of head k, 1-based as in the paper."""
        return self.lambda_decay**k


class StepInputs(NamedTuple):
    """The inputs of a loss at one step.

    Attributes:
      batch: rows [B, T], one microbatch.
      counts_K: `pair_counts` over the whole global batch, one per loss.
      dropout_key: None disables dropout and noise.
      lambda_0: weight of the heads' loss if it is one of two terms (Medusa equation 2).
    """

    batch: Batch
    counts_K: jax.Array
    dropout_key: jax.Array | None = None
    lambda_0: jax.Array | float = 1.0


def next_token_sums(
    params: PyTree,
    backbone_of: Callable[[PyTree], Backbone],
    hidden_BTD: jax.Array,
    batch: Batch,
    chunk: int,
    original: Backbone | None = None,
) -> Sums:
    """The backbone's next-token loss, from its hidden states [B, T, D].

    If `original`, the backbone before training, is given, its distribution replaces the labels as the
    target (Medusa 2.3.2).
    """
    teacher, teacher_BTD = None, None
    if original is not None:
        teacher = Teacher(original.lm_head, 1.0, 0.0)
        done = lax.stop_gradient(hidden_BTD)
        weights = regather(original.params, done, original.llama.mesh)
        original = dataclasses.replace(original, params=weights)
        teacher_BTD = original.forward(*rows(batch))

    def logits(p: PyTree, hidden: jax.Array) -> jax.Array:
        return backbone_of(p).lm_head(hidden)

    mask_BT = pair_mask(batch["counted"], batch["segment_ids"], 1)
    labels_BT = shift_left(batch["tokens"], 1)
    return cross_entropy_sums(
        logits, params, hidden_BTD, labels_BT, mask_BT, chunk,
        teacher, teacher_BTD, mesh_to_split(backbone_of(params)),
    )  # fmt: skip


def mesh_to_split(backbone: Backbone) -> Mesh | None:
    """The mesh over which the rows of a loss through this LM head are split (`RowSplit`).

    None if its adapter has dropout, whose random numbers depend on the index among all rows. Without a
    split every chunk sums gradients over devices, which is cheap for an adapter.
    """
    adapter = (backbone.lora or {}).get("lm_head", {})
    return None if "seed" in adapter else backbone.llama.mesh


def next_token_mean(sums: Sums, count: jax.Array) -> jax.Array:
    """L_LM (or the KL): the mean over all tokens that have a loss."""
    return (sums.loss - sums.entropy) / jnp.maximum(count, 1.0)


def backbone_loss(
    params: PyTree,
    backbone_of: Callable[[PyTree], Backbone],
    inputs: StepInputs,
    chunk: int,
    original: Backbone | None = None,
) -> tuple[jax.Array, Sums]:
    """Next-token cross-entropy of packed rows; counts are `pair_counts(batch, (1,))`.

    Returns: L_LM, and the sums (leading axis of size 1).
    """
    hidden_BTD = backbone_of(params).forward(*rows(inputs.batch))
    sums = next_token_sums(params, backbone_of, hidden_BTD, inputs.batch, chunk, original)
    return next_token_mean(sums, inputs.counts_K[0]), jax.tree.map(lambda s: s[None], sums)


def heads_sums(
    params: PyTree,
    split: Split,
    hidden_BTE: jax.Array,
    objective: HeadObjective,
    inputs: StepInputs,
) -> tuple[jax.Array, Sums]:
    """sum_k lambda_k L_k, with each L_k (see `HeadTargets`) averaged over the head's counted pairs.

    k is 1-based as in the paper; head k predicts k + 1 tokens ahead. All arrays are indexed by the predicted
    token, so that all heads' predictions of a token share its label and teacher. A token outside the draft
    vocabulary counts as a miss and has no cross-entropy, but keeps its regression term.

    Args:
      split: returns head parameters and the heads' backbone. A draft vocabulary limits its LM head, and
        hence the teacher's distribution (`heads/vocabulary.py`).

    Returns: the loss, and the sums per head, each [K].
    """
    drafter, targets, batch = objective.drafter, objective.targets, inputs.batch
    heads, backbone = split(params)
    read_BTE, dropout_key = hidden_BTE, inputs.dropout_key
    if targets.noise and dropout_key is not None:
        dropout_key, noise_key = jax.random.split(dropout_key)
        read_BTE += hidden_noise(noise_key, hidden_BTE, targets.noise)
    text = TextRows(read_BTE, *rows(batch), dropout_key)
    index_BA = batch.get("anchors")
    if index_BA is None:
        features_KBTD = drafter.features(heads, backbone, text)
    else:
        features_KBTD = drafter.features_at(heads, backbone, text, index_BA)
    teacher, teacher_BTD, weight = None, None, targets.label_weight
    final_BTD = hidden_BTE[..., : backbone.llama.config.d_model]
    before_BTD = lax.stop_gradient(delay(final_BTD, 1))  # just before the target
    if targets.teacher_weight or targets.distance_weight or targets.confidence_weight:
        frozen: Backbone = lax.stop_gradient(backbone)
        teacher = Teacher(
            frozen.lm_head, targets.teacher_weight, targets.label_weight,
            targets.distance_weight, targets.confidence_weight,
        )  # fmt: skip
        teacher_BTD = before_BTD
        weight = 1.0  # `Teacher` weights both terms
    label_BT, T = backbone.places(batch["tokens"]), batch["tokens"].shape[1]
    scored_BT = label_BT < backbone.outputs
    label_BT = jnp.where(scored_BT, label_BT, 0)
    mesh = (
        mesh_to_split(backbone)
        if drafter.heads.lm_head == "shared"
        else backbone.llama.mesh
    )
    logits_K, features_K, mask_K, weight_K, sums_K = [], [], [], [], []
    count_K = jnp.maximum(inputs.counts_K, 1.0).astype(at_least_f32(hidden_BTE.dtype))
    further = jnp.zeros((), count_K.dtype)
    if targets.induction_weight:
        layer = induction().queries_keys(drafter, heads, backbone, text)
        pairs_BT = pair_mask(batch["counted"], batch["segment_ids"], 2)
        pairs_BT &= shift_left(scored_BT, 2)
        share = objective.lambda_k(1) / count_K[0]
        found = induction().induction_sum(*layer, batch, pairs_BT)
        further += targets.induction_weight * share * found
    for k in range(drafter.n_heads):

        def logits(p: PyTree, features: jax.Array, k: int = k) -> PyTree:
            heads, backbone = split(p)
            scores = drafter.head_logits(heads, backbone, k, features)
            if not targets.confidence_weight:
                return scores
            return scores, drafter.confidence(heads, lax.stop_gradient(features))

        ahead = k + 2
        mask_BT = pair_mask(batch["counted"], batch["segment_ids"], ahead)
        share = objective.lambda_k(k + 1) / count_K[k]
        if index_BA is not None:  # heads share no labels, so each has a loss of its own
            label_BA, scored_BA, teacher_BAD = (
                None if x is None else columns(x, jnp.minimum(index_BA + ahead, T - 1))
                for x in (label_BT, scored_BT, teacher_BTD)
            )
            of_head, sums = heads_cross_entropy(
                [logits], params, weight * share[None], [features_KBTD[k]], label_BA,
                [columns(mask_BT, index_BA) & scored_BA], objective.chunk, teacher, teacher_BAD, mesh,
            )  # fmt: skip
            further += of_head
            sums_K.append(sums)
            continue
        logits_K.append(logits)
        features_K.append(delay(features_KBTD[k], ahead))
        mask_K.append(delay(mask_BT, ahead) & scored_BT)
        weight_K.append(weight * share)
        if targets.feature_weight:
            distance = feature_sum(features_K[k], before_BTD, delay(mask_BT, ahead))
            further += targets.feature_weight * share * distance
    if index_BA is not None:
        return further, jax.tree.map(lambda *s: jnp.concatenate(s), *sums_K)
    loss, sums = heads_cross_entropy(
        logits_K, params, jnp.stack(weight_K), features_K, label_BT, mask_K, objective.chunk,
        teacher, teacher_BTD, mesh,
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


def head_loss(
    params: PyTree, backbone: Backbone, objective: HeadObjective, inputs: StepInputs
) -> tuple[jax.Array, Sums]:
    """Medusa-1 (Medusa 2.2.1, equation 1): L = sum_k lambda_k L_k.

    The backbone runs once, outside the gradient. Counts are `pair_counts(batch, 2 ... K+1)`.

    Returns: L, and the sums per head, each [K].
    """
    hidden_BTE = lax.stop_gradient(hidden_states(backbone, inputs.batch))
    return heads_sums(params, lambda p: (p, backbone), hidden_BTE, objective, inputs)


def joint_loss(
    params: PyTree,
    backbone_of: Callable[[PyTree], Backbone],
    split: Split,
    objective: HeadObjective,
    inputs: StepInputs,
    original: Backbone | None = None,
) -> tuple[jax.Array, Sums]:
    """Medusa-2 (Medusa 2.2.2, equation 2): L = L_LM + lambda_0 sum_k lambda_k L_k.

    One pass of the backbone serves both terms, and the heads' gradient flows into it. Counts are
    `pair_counts(batch, (1, 2 ... K+1))`.

    Args:
      backbone_of: the backbone of L_LM; `split` returns the one for heads.
      original: the backbone before training, if its distribution is the target of L_LM.

    Returns: L, and the sums, each [1 + K], the backbone's first.
    """
    batch = inputs.batch
    hidden_BTE = backbone_of(params).forward(*rows(batch))
    chunk = objective.chunk
    hidden_BTD = hidden_BTE[..., : backbone_of(params).llama.config.d_model]
    own = next_token_sums(params, backbone_of, hidden_BTD, batch, chunk, original)
    of_heads = inputs._replace(counts_K=inputs.counts_K[1:])
    heads_loss, heads = heads_sums(params, split, hidden_BTE, objective, of_heads)
    loss = next_token_mean(own, inputs.counts_K[0]) + inputs.lambda_0 * heads_loss
    return loss, jax.tree.map(lambda s, t: jnp.concatenate([s[None], t]), own, heads)
