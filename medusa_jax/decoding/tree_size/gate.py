"""Decide before each step whether drafting is faster than plain decoding, and with which size of the tree.

A step with drafts takes longer than a plain one, so drafts that are seldom right make decoding slower. A
*gated* engine has several sizes of one ordered tree: plain decoding, then the first n nodes of the order, for
increasing n. A step takes the size with the most tokens per time on the text so far (`rates.py`); under a
lossless rule the text does not depend on it. The decode loop chooses on the device (`decoding/gated.py`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from medusa_jax.decoding.tree_size.rates import (
    RECENT,
    first_counts,
    rates_of,
    tokens_by_size,
)
from medusa_jax.tree.tree import Tree

# Since estimates are noisy: least estimated speed-up to change the size (MARGIN), and over plain decoding to begin with
# drafts (WORTH).
MARGIN, WORTH = 1.01, 1.05
# Largest share of the time that trials of drafts may lose, and bounds of the plain steps between two trials.
OVERHEAD, PAUSES = 0.02, (32, 256)
# Least number of steps with drafts in such a trial.
TRIAL = 4


class Gate(struct.PyTreeNode):
    """State of the choice among N sizes; one for all rows of a batch. Arrays of one number have shape [1].

    Attributes:
      depths: of the sizes, 0 for plain decoding; constant.
      ratio_N: time of a step with each size over a plain step's.
      rate_N: p of each size.
      steps_N: steps taken with each size.
      index_1: size of the next step.
      accepted_L, tested_L, expected_L: by level, from 1: drafts accepted, drafts tested, and how many of
        these the rates expect to be accepted; the latest steps count most.
      rest_1: plain steps left in a pause, or steps with drafts left in a trial.
      lost_1: time that drafts have recently lost against plain decoding, in plain steps; 0 while they win.
    """

    depths: tuple[int, ...] = struct.field(pytree_node=False)
    ratio_N: jax.Array
    rate_N: jax.Array
    steps_N: jax.Array
    index_1: jax.Array
    accepted_L: jax.Array
    tested_L: jax.Array
    expected_L: jax.Array
    rest_1: jax.Array
    lost_1: jax.Array

    @classmethod
    def before_text(
        cls,
        trees: Sequence[Tree],
        ratios: Sequence[float],
        tokens: Sequence[float] | None = None,
    ) -> "Gate":
        """The gate of a text's first step.

        Args:
          trees: the sizes, plain decoding first.
          ratios: time of a step with each over a plain step's.
          tokens: tokens per step with each, from a tree file's evidence.
        """
        depths = [tree.depth for tree in trees]
        rate_N = rates_of(tokens, depths)
        counts_3L = first_counts(rate_N, max(depths))
        speed_N = tokens_by_size(counts_3L, rate_N, depths, np) / ratios
        index = int(np.argmax(speed_N))
        index = index if speed_N[index] >= WORTH else 0

        def numbers(values: Any) -> Any:
            return np.array(values, np.float32)

        def counts(*values: int) -> Any:
            return np.array(values, np.int32)

        return cls(
            depths=tuple(depths),
            ratio_N=numbers(ratios),
            rate_N=numbers(rate_N),
            steps_N=counts(*[0] * len(trees)),
            index_1=counts(index),
            accepted_L=numbers(counts_3L[0]),
            tested_L=numbers(counts_3L[1]),
            expected_L=numbers(counts_3L[2]),
            rest_1=counts(0 if index else PAUSES[0]),
            lost_1=numbers([0.0]),
        )

    def always(self, index: int) -> "Gate":
        """The gate before steps that all have one size, to time them."""
        is_other_N = np.arange(len(self.depths)) != index
        return self.replace(
            ratio_N=np.where(is_other_N, np.inf, 1.0).astype(np.float32),
            index_1=np.full(1, index, np.int32),
            rest_1=np.full(1, np.iinfo(np.int32).max if index == 0 else 0, np.int32),
        )

    @property
    def has_plain(self) -> jax.Array:
        """Whether a step may be plain; if not, steps with one size are timed."""
        return jnp.isfinite(self.ratio_N[0])

    def counted(self, index: jax.Array | int, taken: jax.Array | int) -> "Gate":
        """Count steps of this size without changing the acceptance statistics."""
        return self.replace(
            steps_N=self.steps_N + taken * (jnp.arange(len(self.depths)) == index)
        )

    def reset(self, begins_1: jax.Array | bool) -> "Gate":
        """The gate, with the counts before a text's first step where `begins_1`: the evidence alone."""
        first_3L = first_counts(self.rate_N, self.tested_L.shape[0])
        return self.replace(
            accepted_L=jnp.where(begins_1, first_3L[0], self.accepted_L),
            tested_L=jnp.where(begins_1, first_3L[1], self.tested_L),
            expected_L=jnp.where(begins_1, first_3L[2], self.expected_L),
            lost_1=jnp.where(begins_1, 0.0, self.lost_1),
        )

    def tokens(self) -> jax.Array:
        """Tokens per step to expect with each size [N]."""
        counts_3L = jnp.stack([self.accepted_L, self.tested_L, self.expected_L])
        return tokens_by_size(counts_3L, self.rate_N, self.depths, jnp)

    def fastest(self, favoured_N: jax.Array | float) -> jax.Array:
        """Index [1] of the size with the most tokens per time.

        Args:
          favoured_N: factors of the sizes' speeds.
        """
        speed_N = self.tokens() / self.ratio_N * favoured_N
        return jnp.argmax(speed_N, keepdims=True).astype(jnp.int32)

    def after_step(
        self,
        accepted_B: jax.Array,
        levels: int | jax.Array,
        running_B: jax.Array,
        taken: int | jax.Array = 1,
    ) -> "Gate":
        """The gate after a step with the size `index_1`, or several that test no drafts.

        Args:
          accepted_B: levels whose drafts were accepted; for a plain step, 1 if the draft that it tested was right.
          levels: most levels that the step tested: the depth of its size; for a plain step 1 or 0 drafts.
          running_B: rows that took the step.
          taken: number of steps.
        """
        level_L1 = jnp.arange(1, self.tested_L.shape[0] + 1)[:, None]
        accepted_1B, running_1B = accepted_B[None, :], running_B[None, :]
        tested_LB = (level_L1 <= jnp.minimum(accepted_1B + 1, levels)) & running_1B
        accepted_LB = tested_LB & (level_L1 <= accepted_1B)
        tested_L = jnp.sum(tested_LB, axis=1)
        # A plain step tests at most one draft, with the largest size's rate.
        rate_1 = self.rate_N[
            jnp.where(self.index_1 == 0, len(self.depths) - 1, self.index_1)
        ]
        keep = jnp.where(levels > 0, 0.5 ** (1 / RECENT), 1.0)
        emitted_B = jnp.where(running_B, accepted_B + 1, 0).astype(self.lost_1.dtype)
        emitted = jnp.sum(emitted_B) / jnp.sum(running_B)
        lost_1 = self.ratio_N[self.index_1] / self.ratio_N[0] - emitted
        gate = self.counted(self.index_1, taken)
        return gate.replace(
            accepted_L=keep * self.accepted_L + jnp.sum(accepted_LB, axis=1),
            tested_L=keep * self.tested_L + tested_L,
            expected_L=keep * self.expected_L + tested_L * rate_1,
            rest_1=jnp.maximum(self.rest_1 - taken, 0),
            lost_1=jnp.where(self.index_1 > 0, jnp.maximum(self.lost_1 + lost_1, 0.0), 0.0),
        )._with_next_size(levels)

    def _with_next_size(self, levels: int | jax.Array) -> "Gate":
        """The gate with the size of the next step; see `after_step`."""
        size_N = jnp.arange(len(self.depths))
        drafted_1, paused_1 = self.index_1 > 0, (self.index_1 == 0) & (levels == 0)
        trial_1 = paused_1 & (self.rest_1 == 0)
        gate = self.reset(trial_1)
        favoured_N = jnp.where(size_N == self.index_1, MARGIN, 1.0)
        only_drafts_1 = trial_1 | (drafted_1 & (self.rest_1 > 0))
        favoured_N = jnp.where(only_drafts_1 & (size_N == 0), 0.0, favoured_N)
        index_1 = jnp.where(paused_1 & ~trial_1, 0, gate.fastest(favoured_N))
        pause_1 = jnp.clip(gate.lost_1 / OVERHEAD, *PAUSES).astype(jnp.int32)
        rest_1 = jnp.where(drafted_1 | paused_1, gate.rest_1, 0)
        rest_1 = jnp.where(trial_1, TRIAL, rest_1)
        return gate.replace(
            index_1=index_1, rest_1=jnp.where(drafted_1 & (index_1 == 0), pause_1, rest_1)
        )
