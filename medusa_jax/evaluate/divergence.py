"""Where drafted and plain decoding diverge in low precision, and how close the two best scores are there.

Passes over 1 and over M tokens round differently, so two close scores may swap.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.api import Model, Options
from medusa_jax.decoding.penalties import count
from medusa_jax.decoding.places import Places, adjust
from medusa_jax.decoding.request import power_of_two, row_options
from medusa_jax.decoding.sampling import filtered, gumbel
from medusa_jax.decoding.token_sets import NO_TOKEN, words
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.cache import KVCache
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first token at which two texts differ.

    Attributes:
      position: index of that token among the new ones.
      gap: difference of the two best scores (logits, or filtered logits / T + noise).
    """

    position: int
    gap: float

    def facts(self) -> Json:
        """Position and gap; the gap is None where one text ends and the other continues."""
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
    texts = [[*ours, NO_TOKEN], [*theirs, NO_TOKEN]]
    at = next((i for i, (a, b) in enumerate(zip(*texts)) if a != b), None)
    if at is None:
        return None
    if NO_TOKEN in [text[at] for text in texts]:
        return Divergence(at, math.inf)
    text = [*prompt, *theirs[:at]]
    logits_1V = logits_after(model.backbone, pad_text(text), np.int32(len(text)))
    scores_V = scores_of(model, logits_1V, prompt, theirs[:at], option, request)
    second, best = np.sort(scores_V)[-2:]
    return Divergence(at, float(best - second))


def pad_text(text: Sequence[int]) -> np.ndarray:
    """A text as [1, S]; few lengths S, so few programs."""
    tokens_1S = np.zeros((1, power_of_two(len(text), 64)), np.int32)
    tokens_1S[0, : len(text)] = text
    return tokens_1S


def scores_of(
    model: Model,
    logits_1V: jax.Array,
    prompt: Sequence[int],
    answer: Sequence[int],
    option: Options,
    request: int,
) -> np.ndarray:
    """Scores [V] that decide the token after prompt and new text, from its logits."""
    text, V = [*prompt, *answer], logits_1V.shape[1]
    row = model.request([prompt], [option], [request])
    sampling = row_options(row, V).sampling
    penalties = count(
        sampling.penalties, jnp.array([answer], jnp.int32), jnp.array([len(answer)])
    )
    counts_11V = None if penalties is None else penalties.counts_BV[:, None]
    engine = model.engine(tree=Tree.none(), sampled=option.temperature > 0)
    text_11S = None
    if engine.no_repeat_ngram_size:
        text_11S = jnp.asarray(pad_text(text))[None]
    allowed_11W = None
    if row.guides and (guide := row.guides[0]):
        allowed_W = np.zeros(words(V), np.uint32)
        guide.advance(answer)
        guide.fill(allowed_W)
        allowed_11W = jnp.asarray(allowed_W)[None, None]
    last_11 = jnp.full((1, 1), len(text) - 1)
    places = Places(text_11S, last_11, counts_11V, jnp.zeros((1,), jnp.int32), allowed_11W)
    _, chosen_11V = adjust(engine, sampling, model.backbone, places, logits_1V[None])
    if option.temperature > 0:
        at_11 = jnp.array([[len(text)]], jnp.int32)
        noise_11V = gumbel(sampling.key_B, at_11, V, logits_1V.dtype)
        chosen_11V = filtered(engine.kernels, chosen_11V, sampling) + noise_11V
    return np.asarray(chosen_11V[0, 0], np.float64)


@jax.jit
def logits_after(backbone: Backbone, tokens_1S: jax.Array, length: jax.Array) -> jax.Array:
    """Logits [1, V] after `length` tokens, the last of which follows a cached text."""
    llama, S = backbone.llama, tokens_1S.shape[1]
    cache = KVCache.zeros(llama.config, 1, S, llama.dtype)
    _, cache = backbone.read(tokens_1S, cache, jnp.zeros((1,), jnp.int32))
    root_11 = lax.dynamic_slice_in_dim(tokens_1S, length - 1, 1, axis=1)
    before_1 = jnp.broadcast_to(length - 1, (1,)).astype(jnp.int32)
    # Slots from the root on are overwritten or masked, so the cache may hold the whole text.
    root = jnp.zeros((1,), jnp.int32), jnp.ones((1, 1), bool)
    hidden_11D, _ = backbone.read_tree(root_11, *root, cache, before_1)
    return backbone.lm_head(hidden_11D[:, 0])
