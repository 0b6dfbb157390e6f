"""Features, labels and masks of each draft head, from whole rows or from drawn anchors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Drafter, TextRows
from medusa_jax.heads.optional import SupportsAnchors
from medusa_jax.model.backbone import Backbone
from medusa_jax.sharding import Params, split_rows
from medusa_jax.training.losses.packing import LossColumns, take_columns
from medusa_jax.training.losses.pairs import Batch, delay, pair_mask


class HeadTargets(NamedTuple):
    """Targets of heads that predict the same tokens: column t of every array belongs to label t.

    Attributes:
      heads: the heads, 0-based.
      features_K: inputs [B, T, D] of their LM heads.
      labels_BT: the tokens to predict, as indices into the logits.
      scored_BT: whether the label has a logit (a draft vocabulary lacks some).
      pairs_K: True [B, T] where the head's prediction counts.
      before_BTD: the backbone's hidden states just before the labels, which predict them, without gradient.
    """

    heads: list[int]
    features_K: list[jax.Array]
    labels_BT: jax.Array
    scored_BT: jax.Array
    pairs_K: list[jax.Array]
    before_BTD: jax.Array

    def columns(self, mesh: Mesh | None, with_teacher: bool) -> LossColumns:
        """The inputs of the streamed loss.

        Rows are split over the mesh; otherwise every chunk would gather vectors that are split over the tensor
        axis.
        """
        features_K = tuple(split_rows(mesh, x) for x in self.features_K)
        mask_K = tuple(pairs_BT & self.scored_BT for pairs_BT in self.pairs_K)
        teacher_BTD = split_rows(mesh, self.before_BTD) if with_teacher else None
        return LossColumns(features_K, self.labels_BT, mask_K, teacher_BTD)


def head_targets(
    drafter: Drafter,
    params: Params,
    backbone: Backbone,
    text: TextRows,
    hidden_BTE: jax.Array,
    batch: Batch,
) -> list[HeadTargets]:
    """The targets of all heads.

    Over whole rows, column t of every array is the prediction of token t, so all heads share one label and one
    teacher per column. At drawn anchors (`draw_anchors`) each head has its own.

    Args:
      text: what the heads read, perhaps with noise.
      hidden_BTE: the backbone's hidden states.
    """
    T, D = batch["tokens"].shape[1], backbone.llama.config.d_model
    columns_BT = backbone.columns_of(batch["tokens"])
    scored_BT = columns_BT < backbone.outputs
    labels_BT = jnp.where(scored_BT, columns_BT, 0)
    before_BTD = lax.stop_gradient(delay(hidden_BTE[..., :D], 1))
    pairs_K = [
        pair_mask(batch["counted"], batch["segment_ids"], k + 2)
        for k in range(drafter.n_heads)
    ]
    if "anchors" not in batch:
        features_KBTD = drafter.features(params, backbone, text)
        of_rows = HeadTargets(
            heads=list(range(drafter.n_heads)),
            features_K=[delay(x, k + 2) for k, x in enumerate(features_KBTD)],
            labels_BT=labels_BT,
            scored_BT=scored_BT,
            pairs_K=[delay(pairs_BT, k + 2) for k, pairs_BT in enumerate(pairs_K)],
            before_BTD=before_BTD,
        )
        return [of_rows]

    if not isinstance(drafter, SupportsAnchors):
        raise UserError(f"{drafter.name} does not train at anchors")
    index_BA = batch["anchors"]
    features_KBAD = drafter.features_at(params, backbone, text, index_BA)
    targets = []
    for k, pairs_BT in enumerate(pairs_K):
        target_BA = jnp.minimum(index_BA + k + 2, T - 1)
        at_anchors = HeadTargets(
            heads=[k],
            features_K=[features_KBAD[k]],
            labels_BT=take_columns(labels_BT, target_BA),
            scored_BT=take_columns(scored_BT, target_BA),
            pairs_K=[take_columns(pairs_BT, index_BA)],
            before_BTD=take_columns(before_BTD, target_BA),
        )
        targets.append(at_anchors)
    return targets
