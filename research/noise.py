"""Whether rounding explains a divergence of drafted and plain text: the noise of the scores there.

Three passes compute the same position (the whole text at once; the last token after a cached prefix;
M tokens after it), and the positions right before it as well, since three roundings may agree by
chance. The largest difference between any two passes at one position, over its ten best tokens, is the
*noise band*. A divergence is a tie if the gap between the two best scores is at most twice the band:
each of the two scores can move by the band.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.api import Model, Options
from medusa_jax.evaluate.divergence import Divergence, padded, scores_of, whole_text
from medusa_jax.heads.drafter import Backbone
from medusa_jax.tree.tree import Tree

# Positions at which the noise is measured: the divergence and those right before it.
POSITIONS = 8


class Noise(NamedTuple):
    """Noise at a divergence.

    Attributes:
      gap: difference of the two best scores.
      noise_band: how far passes of different shape move the scores of the best tokens here.
      at_cut: the sampling filters keep different tokens in different passes.
    """

    gap: float
    noise_band: float
    at_cut: bool

    @property
    def is_tie(self) -> bool:
        """Whether rounding alone explains the divergence."""
        return self.at_cut or self.gap <= 2 * self.noise_band


def noise_at(
    model: Model,
    prompt: Sequence[int],
    theirs: Sequence[int],
    where: Divergence,
    option: Options,
    request: int,
    tree: Tree,
) -> Noise:
    """Measure the noise at a divergence from the plain text `theirs`.

    Args:
      tree: the tree of the drafted text; gives M of the drafted pass.
    """
    if not math.isfinite(where.gap):  # rounding never ends one text and not the other
        return Noise(where.gap, 0.0, at_cut=False)
    new, pair = theirs[: where.position], [where.ours, where.theirs]
    text = [*prompt, *new]
    tokens_1S = padded([*text, *[0] * tree.n_nodes])
    passes = [
        three_passes(tree, model.backbone, tokens_1S, np.int32(length))
        for length in range(len(text), max(len(text) - POSITIONS, 0), -1)
    ]
    kept_BV = np.isfinite(scores_of(model, passes[0], prompt, new, option, request))
    moved = max(movement(np.asarray(x, np.float64), pair) for x in passes)
    cut = bool((kept_BV != kept_BV[:1])[:, pair].any())
    return Noise(where.gap, float(moved / (option.temperature or 1.0)), cut)


def movement(logits_BV: np.ndarray, also: Sequence[int]) -> float:
    """The largest difference between two passes in the logit of a token, over the ten best and `also`."""
    near = [*np.argsort(logits_BV[1])[-10:], *also]
    return float(np.ptp(logits_BV[:, near], axis=0).max())


@partial(jax.jit, static_argnums=0)
def three_passes(
    tree: Tree, backbone: Backbone, tokens_1S: jax.Array, length: jax.Array
) -> jax.Array:
    """Logits [3, V] after the first `length` tokens, from three passes of different shapes.

    One pass over all tokens; the last token after a cached prefix; M tokens after that prefix, with
    the last token as the root of `tree`. S must leave room for M slots after the text.
    """
    hidden_1SD, cache = whole_text(backbone, tokens_1S)
    last_111 = jnp.broadcast_to(length - 1, (1, 1, 1))
    hidden = [jnp.take_along_axis(hidden_1SD, last_111, axis=1)[:, 0]]
    root_11 = lax.dynamic_slice_in_dim(tokens_1S, length - 1, 1, axis=1)
    before_1 = jnp.broadcast_to(length - 1, (1,)).astype(jnp.int32)
    # Slots from the root on are overwritten or masked, so the cache may hold the whole text.
    for mask_MM, depth_M in (
        (np.ones((1, 1), bool), np.zeros(1, np.int32)),
        (tree.mask_MM, tree.depth_M),
    ):
        nodes_1M = jnp.broadcast_to(root_11, (1, len(depth_M)))
        at_1M = before_1[:, None] + jnp.asarray(depth_M)[None, :]
        out, _ = backbone.decode(nodes_1M, at_1M, cache, before_1, jnp.asarray(mask_MM))
        hidden.append(out[:, 0])
    return backbone.lm_head(jnp.concatenate(hidden))
