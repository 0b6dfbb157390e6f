"""Losses: which pairs count, how terms are weighted, and how they are summed chunk by chunk."""

from medusa_jax.training.losses.objectives import (
    HeadObjective,
    HeadTargets,
    StepInputs,
    backbone_loss,
    head_loss,
    hidden_states,
    joint_loss,
    next_token_mean,
)
from medusa_jax.training.losses.streamed import Sums
from medusa_jax.training.losses.targets import (
    Batch,
    delay,
    draw_anchors,
    pair_counts,
    pair_mask,
    rows,
)

__all__ = [
    "Batch",
    "HeadObjective",
    "HeadTargets",
    "StepInputs",
    "Sums",
    "backbone_loss",
    "delay",
    "draw_anchors",
    "head_loss",
    "hidden_states",
    "joint_loss",
    "next_token_mean",
    "pair_counts",
    "pair_mask",
    "rows",
]
