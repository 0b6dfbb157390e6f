"""Steps that draft only while drafts pay.

A step with drafts takes longer than a plain one, so drafts that are seldom right make
decoding slower. A *gated* engine has several trees, the empty one first. Each step uses the
tree with the most tokens per time on the text so far; under a lossless rule the text does
not depend on the tree. The decode loop chooses on the device (`gated.py`).

The estimate assumes that a draft is accepted at every level with the same probability p, so
a tree of depth d emits 1 + p + ... + p^d tokens per step on average. The unit of time is a
plain step.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from medusa_jax.heads.drafter import Drafter
from medusa_jax.model.cache import KVCache
from medusa_jax.tree.tree import Tree

# Steps after which a count weighs half; levels that the acceptance rate of earlier texts stands for in a new one.
RECENT, PRIOR = 16, 4.0
# Another tree must be faster by this factor, since p is uncertain.
MARGIN = 1.05
# Plain steps before drafts are tried again, at first and at most (the number doubles each time that drafts lose);
# levels to assume as accepted, and as tested, at such a trial.
PAUSES, AGAIN = (64, 512), (1.0, 2.0)


def follows_free(drafter: Drafter) -> bool:
    """Whether plain steps may keep the drafter's state: accepted tokens cost it no layers.

    A drafter with a cache of keys and values runs layers over every accepted token.
    """
    state = jax.eval_shape(lambda: drafter.start(1, 1, jnp.float32))
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, KVCache))
    return not any(isinstance(part, KVCache) for part in parts)


class Gate(struct.PyTreeNode):
    """State of the choice among N trees; one for all rows of a batch. Arrays of one number have shape [1].

    Attributes:
      depths: of the trees; constant.
      follows: the drafter's state follows plain steps (`follows_free`); constant.
      ratio_N: time of a step with each tree; 1 for the empty one.
      steps_N: steps taken with each tree.
      index_1: of the tree of the next step.
      accepted_1, tested_1: levels whose drafts were accepted, and levels tested, the latest steps counting most.
      rest_1, pause_1: plain steps until drafts are tried again, and the length of the next pause.
      followed_B: text positions that the drafter has read.
    """

    depths: tuple[int, ...] = struct.field(pytree_node=False)
    follows: bool = struct.field(pytree_node=False)
    ratio_N: jax.Array
    steps_N: jax.Array
    index_1: jax.Array
    accepted_1: jax.Array
    tested_1: jax.Array
    rest_1: jax.Array
    pause_1: jax.Array
    followed_B: jax.Array

    @classmethod
    def before_text(
        cls,
        trees: Sequence[Tree],
        drafter: Drafter,
        rows: int,
        ratios: Sequence[float],
        acceptance_rate: float,
    ) -> "Gate":
        """The gate of a text's first step.

        Args:
          ratios: time of a step with each tree, over a plain step's.
          acceptance_rate: p over earlier texts.
        """
        one: Any = np.ones(1, np.float32)
        zero: Any = np.zeros(1, np.int32)
        ratio_N: Any = np.asarray(ratios, np.float32)
        followed_B: Any = np.zeros(rows, np.int32)
        gate = cls(
            depths=tuple(tree.depth for tree in trees),
            follows=follows_free(drafter),
            ratio_N=ratio_N,
            steps_N=ratio_N.astype(np.int32) * 0,
            index_1=zero,
            accepted_1=PRIOR * acceptance_rate * one,
            tested_1=PRIOR * one,
            rest_1=zero + PAUSES[0],
            pause_1=zero + PAUSES[0],
            followed_B=followed_B,
        )
        index_1 = np.asarray(gate.fastest(1), np.int32)
        if not gate.follows:  # drafts can only be tried at the beginning
            index_1 = np.maximum(index_1, 1)
        return gate.replace(index_1=index_1)

    def fastest(self, current: int) -> jax.Array:
        """Index [1] of the tree with the most tokens per time; `current` is the one in use."""
        depth_N = np.array(self.depths, np.float32)
        p_1 = jnp.minimum(self.accepted_1 / self.tested_1, 0.999)
        speed_N = (1 - p_1 ** (depth_N + 1)) / (1 - p_1) / self.ratio_N
        favoured_N = np.where(np.arange(len(depth_N)) == current, MARGIN, 1.0)
        best_1 = jnp.argmax(speed_N * favoured_N.astype(np.float32), keepdims=True)
        return best_1.astype(jnp.int32)

    def after_step(
        self,
        index: int,
        accepted_B: jax.Array | None,
        running_B: jax.Array,
        length_B: jax.Array,
    ) -> "Gate":
        """The gate after a step.

        Args:
          index: of the tree that the step took.
          accepted_B: levels whose drafts were accepted; after a plain step, whether one draft would have been
            (None: nobody knows).
          running_B: rows that took the step.
          length_B: text positions after it.
        """
        followed_B = length_B if index or self.follows else self.followed_B
        new = self.replace(
            steps_N=self.steps_N + (np.arange(len(self.depths)) == index),
            followed_B=followed_B,
        )
        if accepted_B is not None:
            keep, depth = 0.5 ** (1 / RECENT), self.depths[index] or 1
            tested_B = jnp.minimum(accepted_B + 1, depth)
            new = new.replace(
                accepted_1=keep * self.accepted_1 + jnp.sum(accepted_B * running_B),
                tested_1=keep * self.tested_1 + jnp.sum(tested_B * running_B),
            )
            new = new.replace(index_1=new.fastest(index))
            lost_1 = (new.index_1 == 0) & bool(index)
            longer_1 = jnp.minimum(2 * self.pause_1, PAUSES[1])
            return new.replace(
                rest_1=jnp.where(lost_1, self.pause_1, self.rest_1),
                pause_1=jnp.where(lost_1, longer_1, self.pause_1),
            )
        if not self.follows:
            return new
        rest_1 = self.rest_1 - 1
        again_1 = rest_1 <= 0
        return new.replace(
            index_1=again_1.astype(jnp.int32),
            rest_1=rest_1,
            accepted_1=jnp.where(again_1, AGAIN[0], self.accepted_1),
            tested_1=jnp.where(again_1, AGAIN[1], self.tested_1),
        )
