"""Where drafted and plain decoding diverge in low precision, and whether rounding explains it.

Passes over 1 and over M tokens round differently, so two close scores may swap. How close they have
to be is measured at the divergence: three passes compute the same position (the whole text at once;
the last token after a cached prefix; M tokens after it), and the positions right before it as well,
since three roundings may agree by chance. The largest difference between any two passes at one
position, over its ten best tokens, is the *noise band*. A divergence is a tie if the gap between the
two best scores is at most twice the band: each of the two scores can move by the band.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.api import Model, Options
from medusa_jax.decoding.generate import power_of_two
from medusa_jax.decoding.penalties import count, penalise, penalties_of
from medusa_jax.decoding.sampling import Sampling, filtered, gumbel, row_keys
from medusa_jax.heads.drafter import Backbone
from medusa_jax.model.cache import KVCache
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json

# Positions at which the noise is measured: the divergence and those right before it.
POSITIONS = 8
# Stands for the token after the end of a text.
NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first token at which two texts differ.

    Attributes:
      position: index of that token among the new ones.
      ours, theirs: the drafted and the plain token.
      gap: difference of the two best scores (logits, or filtered logits / T + noise).
      noise_band: how far passes of different shape move the scores of the best tokens here.
      at_cut: the sampling filters keep different tokens in different passes.
    """

    position: int
    ours: int
    theirs: int
    gap: float
    noise_band: float
    at_cut: bool

    def facts(self) -> Json:
        """Position and gap; None as the gap where one text ends and the other continues."""
        gap = self.gap if math.isfinite(self.gap) else None
        return {"position": self.position, "gap": gap}

    @property
    def is_tie(self) -> bool:
        """Whether rounding alone explains the divergence."""
        return self.at_cut or self.gap <= 2 * self.noise_band


def find_divergence(
    model: Model,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    option: Options,
    request: int,
    tree: Tree,
    noise_at: int = POSITIONS,
) -> Divergence | None:
    """Find where the drafted text `ours` diverges from the plain text `theirs`; None if it does not.

    Args:
      request: the request id of both texts.
      tree: the tree that `ours` was decoded with; gives M of the drafted pass.
      noise_at: positions at which the noise is measured.
    """
    # Rounding never explains that one text ends where the other continues.
    both = [[*ours, NO_TOKEN], [*theirs, NO_TOKEN]]
    first = next((i for i, (a, b) in enumerate(zip(*both)) if a != b), None)
    if first is None:
        return None
    pair = [text[first] for text in both]
    if NO_TOKEN in pair:
        return Divergence(first, pair[0], pair[1], math.inf, 0.0, at_cut=False)
    text = [*prompt, *theirs[:first]]
    padded = np.zeros((1, power_of_two(len(text) + tree.n_nodes, 64)), np.int32)
    padded[0, : len(text)] = text
    passes = [
        three_passes(tree, model.backbone, padded, np.int32(length))
        for length in range(len(text), max(len(text) - noise_at, 0), -1)
    ]
    logits_BV = without_barred(passes[0], text, model.no_repeat_ngram_size)
    logits_BV = penalised_after(logits_BV, prompt, theirs[:first], option)
    scores_BV = np.asarray(perturbed(logits_BV, len(text), option, request), np.float64)
    kept_BV = np.isfinite(scores_BV)
    moved = max(movement(np.asarray(x, np.float64), pair) for x in passes)
    best = np.sort(scores_BV[1])[-2:]
    return Divergence(
        position=first,
        ours=pair[0],
        theirs=pair[1],
        gap=float(best[1] - best[0]),
        noise_band=float(moved / (option.temperature or 1.0)),
        at_cut=bool((kept_BV != kept_BV[:1])[:, pair].any()),
    )


def barred_tokens(text: Sequence[int], n: int) -> list[int]:
    """Tokens that must not follow `text`, on the host.

    Example, n = 3:  a b c a b  ->  c
    """
    tail = tuple(text[len(text) - n + 1 :])
    if len(tail) < n - 1:
        return []
    ends = range(n - 1, len(text))
    return sorted({text[end] for end in ends if tuple(text[end - n + 1 : end]) == tail})


def without_barred(logits_BV: jax.Array, text: Sequence[int], n: int) -> jax.Array:
    """Logits of one position, minus infinity for tokens barred after `text` (n = 0: none)."""
    barred = barred_tokens(text, n) if n else []
    return logits_BV.at[:, jnp.array(barred, int)].set(-jnp.inf) if barred else logits_BV


def penalised_after(
    logits_BV: jax.Array, prompt: Sequence[int], new: Sequence[int], option: Options
) -> jax.Array:
    """Logits of one position, [P, V], with the option's penalties for prompt and new text."""
    penalties = penalties_of([option.penalties], [prompt], logits_BV.shape[-1])
    penalties = count(penalties, jnp.array([new], jnp.int32), jnp.array([len(new)]))
    if penalties is None:
        return logits_BV
    counts_B1V, no_more = penalties.counts_BV[:, None], jnp.zeros((1,), jnp.int32)
    return penalise(logits_BV[None], penalties, counts_B1V, no_more)[0]


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
    config, S = backbone.llama.config, tokens_1S.shape[1]

    def empty() -> KVCache:
        return KVCache.zeros(
            config.n_layers, 1, S, config.n_kv_heads, config.head_dim, backbone.llama.dtype
        )

    position_1S = jnp.arange(S)[None, :]
    start = jnp.zeros((1,), jnp.int32)
    hidden_1SD, cache = backbone.decode(tokens_1S, position_1S, empty(), start)
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


def perturbed(
    logits_BV: jax.Array, position: int, option: Options, request: int
) -> jax.Array:
    """Scores [P, V] whose argmax plain decoding takes, for P logit rows of one position."""
    if option.temperature == 0:
        return logits_BV
    seed, number = np.array([option.seed % 2**32], np.uint32), np.array([request], np.int32)
    sampling = Sampling(
        temperature_B=jnp.array([option.temperature], jnp.float32),
        top_k_B=jnp.array([option.top_k], jnp.int32),
        top_p_B=jnp.array([option.top_p], jnp.float32),
        min_p_B=jnp.array([option.min_p], jnp.float32),
        key_B=row_keys(jnp.asarray(seed), jnp.asarray(number)),
    )
    return _perturbed(logits_BV, sampling, jnp.array([[position]], jnp.int32))


@jax.jit
def _perturbed(
    logits_BV: jax.Array, sampling: Sampling, position_11: jax.Array
) -> jax.Array:
    noise_11V = gumbel(sampling.key_B, position_11, logits_BV.shape[-1], logits_BV.dtype)
    noise_BV = jnp.broadcast_to(noise_11V[0], logits_BV.shape)
    return filtered(logits_BV[None], sampling)[0] + noise_BV
