"""Where drafted and plain decoding diverge in low precision, and how close the two best scores are there.

Passes over 1 and over M tokens round differently, so two close scores may swap. `python -m research
ties` measures how close they have to be.
"""

import dataclasses
import math
from collections.abc import Sequence

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
from medusa_jax.whole_files import Json

# Stands for the token after the end of a text.
NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first token at which two texts differ.

    Attributes:
      position: index of that token among the new ones.
      ours, theirs: the drafted and the plain token.
      gap: difference of the two best scores (logits, or filtered logits / T + noise).
    """

    position: int
    ours: int
    theirs: int
    gap: float

    def facts(self) -> Json:
        """Position and gap; None as the gap where one text ends and the other continues."""
        gap = self.gap if math.isfinite(self.gap) else None
        return {"position": self.position, "gap": gap}


def find_divergence(
    model: Model,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    option: Options,
    request: int,
) -> Divergence | None:
    """Find where the drafted text `ours` diverges from the plain text `theirs`; None if it does not.

    Args:
      request: the request id of both texts.
    """
    # Rounding never explains that one text ends where the other continues.
    both = [[*ours, NO_TOKEN], [*theirs, NO_TOKEN]]
    first = next((i for i, (a, b) in enumerate(zip(*both)) if a != b), None)
    if first is None:
        return None
    pair = [text[first] for text in both]
    if NO_TOKEN in pair:
        return Divergence(first, pair[0], pair[1], math.inf)
    text = [*prompt, *theirs[:first]]
    logits_BV = logits_after(model.backbone, padded(text), np.int32(len(text)))
    scores_BV = scores_of(model, logits_BV, prompt, theirs[:first], option, request)
    best = np.sort(scores_BV[0])[-2:]
    return Divergence(first, pair[0], pair[1], float(best[1] - best[0]))


def padded(text: Sequence[int], room: int = 0) -> np.ndarray:
    """A text as [1, S] with room for further tokens; few lengths S, so few programs."""
    tokens_1S = np.zeros((1, power_of_two(len(text) + room, 64)), np.int32)
    tokens_1S[0, : len(text)] = text
    return tokens_1S


def scores_of(
    model: Model,
    logits_BV: jax.Array,
    prompt: Sequence[int],
    new: Sequence[int],
    option: Options,
    request: int,
) -> np.ndarray:
    """Scores [P, V] that decide the token after prompt and new text, from P rows of logits."""
    text = [*prompt, *new]
    logits_BV = without_barred(logits_BV, text, model.no_repeat_ngram_size)
    logits_BV = penalised_after(logits_BV, prompt, new, option)
    return np.asarray(perturbed(logits_BV, len(text), option, request), np.float64)


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


@jax.jit
def logits_after(backbone: Backbone, tokens_1S: jax.Array, length: jax.Array) -> jax.Array:
    """Logits [1, V] after the first `length` tokens, as in plain decoding: the last one after a cached text."""
    _, cache = whole_text(backbone, tokens_1S)
    root_11 = lax.dynamic_slice_in_dim(tokens_1S, length - 1, 1, axis=1)
    before_1 = jnp.broadcast_to(length - 1, (1,)).astype(jnp.int32)
    # Slots from the root on are overwritten or masked, so the cache may hold the whole text.
    hidden_11D, _ = backbone.decode(
        root_11, before_1[:, None], cache, before_1, jnp.ones((1, 1), bool)
    )
    return backbone.lm_head(hidden_11D[:, 0])


def whole_text(backbone: Backbone, tokens_1S: jax.Array) -> tuple[jax.Array, KVCache]:
    """Hidden states [1, S, D] of a text, and the cache with it."""
    c, S = backbone.llama.config, tokens_1S.shape[1]
    dtype = backbone.llama.dtype
    empty = KVCache.zeros(c.n_layers, 1, S, c.n_kv_heads, c.head_dim, dtype)
    start_1 = jnp.zeros((1,), jnp.int32)
    return backbone.decode(tokens_1S, jnp.arange(S)[None, :], empty, start_1)


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
