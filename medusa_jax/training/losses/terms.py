"""The terms of a loss that read logits, for one head and a chunk of targets.

A new term is a function of `Guesses`, an entry of `TERMS`, and its weight a field of `TrainConfig`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax


class TeacherProbs(NamedTuple):
    """The teacher's distribution over a chunk of targets: p [B, T, V], its entropy [B, T]."""

    p_BTV: jax.Array
    entropy_BT: jax.Array

    @classmethod
    def of_logits(cls, logits_BTV: jax.Array) -> "TeacherProbs":
        """The distribution with these logits, without gradient."""
        logp_BTV = jax.nn.log_softmax(lax.stop_gradient(logits_BTV))
        p_BTV = jnp.exp(logp_BTV)
        return cls(p_BTV, -jnp.sum(p_BTV * logp_BTV, axis=-1))


@dataclass(frozen=True)
class Guesses:
    """A head's guesses of a chunk of targets.

    Attributes:
      logits_BTV: its logits.
      labels_BT: the tokens to predict.
      confidence_BT: the logit of its confidence, if that is trained.
      teacher: the teacher's distribution, if a term reads it.
    """

    logits_BTV: jax.Array
    labels_BT: jax.Array
    confidence_BT: jax.Array | None
    teacher: TeacherProbs | None

    @cached_property
    def label_BT1(self) -> jax.Array:
        """The logits of the labels."""
        return jnp.take_along_axis(self.logits_BTV, self.labels_BT[..., None], axis=-1)

    @cached_property
    def log_sum_BT(self) -> jax.Array:
        """log sum exp of the logits."""
        return jax.nn.logsumexp(self.logits_BTV, axis=-1)

    @cached_property
    def nll_BT(self) -> jax.Array:
        """Cross-entropy with the labels, in nats."""
        return self.log_sum_BT - self.label_BT1[..., 0]

    @cached_property
    def rank_BT(self) -> jax.Array:
        """Number of tokens before the label. Counting is cheaper than a sort or top-k."""
        # NaN counts as better, and a label that is not finite as the last (`heads/ranks.py`).
        label_BT1 = jnp.where(jnp.isfinite(self.label_BT1), self.label_BT1, jnp.nan)
        return jnp.sum(lax.stop_gradient(~(self.logits_BTV <= label_BT1)), axis=-1)

    @cached_property
    def distance_BT(self) -> jax.Array:
        """L1 distance from the teacher's distribution."""
        assert self.teacher is not None
        q_BTV = jnp.exp(self.logits_BTV - self.log_sum_BT[..., None])
        return jnp.sum(jnp.abs(q_BTV - self.teacher.p_BTV), axis=-1)


def label_term(guesses: Guesses) -> jax.Array:
    return guesses.nll_BT


def teacher_term(guesses: Guesses) -> jax.Array:
    """Cross-entropy with the teacher's distribution [B, T] (Hydra 6.1, Amphista eq. 7-9)."""
    assert guesses.teacher is not None
    expected_BT = jnp.sum(guesses.teacher.p_BTV * guesses.logits_BTV, axis=-1)
    return guesses.log_sum_BT - expected_BT


def distance_term(guesses: Guesses) -> jax.Array:
    """L1 distance from the teacher's distribution [B, T] (DSpark).

    One minus half of it is the probability that rejection sampling accepts a draft.
    """
    return guesses.distance_BT


def confidence_term(guesses: Guesses) -> jax.Array:
    """Binary cross-entropy of the confidence with that probability [B, T] (DSpark)."""
    assert guesses.confidence_BT is not None
    accepted_BT = lax.stop_gradient(1 - guesses.distance_BT / 2)
    return optax.sigmoid_binary_cross_entropy(guesses.confidence_BT, accepted_BT)


TERMS: dict[str, Callable[[Guesses], jax.Array]] = {
    "label": label_term,
    "teacher": teacher_term,
    "distance": distance_term,
    "confidence": confidence_term,
}
# The terms that need the teacher's distribution.
OF_TEACHER = TERMS.keys() - {"label"}


def masked_sum(x_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """The sum over the pairs that count."""
    return jnp.sum(jnp.where(mask_BT, x_BT, 0.0))
