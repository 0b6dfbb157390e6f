"""Per-request sampling: temperature, filters, and noise keyed by request and position.

Gumbel noise g[pos] depends only on the request and the absolute position. Therefore
argmax(logits / T + g[pos]) is a sample of softmax(logits / T) that does not depend on how
the position was reached: plain decoding, any tree and any batch draw the same token.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.typing import DTypeLike

from medusa_jax.decoding.penalties import Penalties
from medusa_jax.decoding.token_sets import ALL
from medusa_jax.model.kernels import Kernels


class Sampling(struct.PyTreeNode):
    """Sampling parameters, one entry per row of the batch.

    Attributes:
      temperature_B: 0 is greedy.
      top_k_B: keep the k largest logits; 0 keeps all.
      top_p_B: keep the smallest set of tokens with at least this probability; 1 keeps all.
      min_p_B: drop tokens with less than this share of the largest probability; 0 keeps all.
      key_B: the row's random key, from its seed and its request id, never its batch slot.
      epsilon_B, delta_B: thresholds of typical acceptance.
      penalties: biases and penalties; None if no row has any.
      first_BW: the tokens that may come first (`token_sets`); None: all.
    """

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    key_B: jax.Array
    epsilon_B: jax.Array
    delta_B: jax.Array
    penalties: Penalties | None = None
    first_BW: jax.Array | None = None

    @property
    def barred_B(self) -> jax.Array | None:
        """Rows in which n-grams may be barred: those without a constraint; None: all.

        A grammar often requires repeated tokens, so both together may leave no token.
        """
        if self.first_BW is None:
            return None
        return jnp.all(self.first_BW == ALL, axis=1)

    def stream(self, tag: int) -> "Sampling":
        """The same rows with keys of a separate noise stream."""
        tagged = jax.vmap(lambda key: jax.random.fold_in(key, np.uint32(tag)))(self.key_B)
        return self.replace(key_B=tagged)


@jax.jit
def row_keys(seed_B: jax.Array, request_B: jax.Array) -> jax.Array:
    """One random key per row, from its seed and its request id (index in the input)."""
    return jax.vmap(
        lambda s, r: jax.random.fold_in(jax.random.key(s, impl="threefry2x32"), r)
    )(seed_B, request_B)


@jax.named_scope("sampling")
def gumbel(
    key_B: jax.Array, positions_BT: jax.Array, tokens: int | jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Gumbel noise of each row's absolute positions: [B, T, O].

    Equals `jax.random.gumbel(fold_in(key, position), (V,), float32)` at these tokens: Threefry
    (Salmon et al. 2011) hashes each token's number, so other tokens need not be drawn.

    Args:
      tokens: the number of tokens, or their ids [O].
    """
    ids_O = jnp.arange(tokens) if isinstance(tokens, int) else tokens
    fold_in = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))
    words_BT2 = jax.random.key_data(fold_in(key_B, positions_BT))[..., None]
    low_O = jnp.broadcast_to(ids_O.astype(jnp.uint32), (*positions_BT.shape, len(ids_O)))
    first, second = threefry2x32_p.bind(
        words_BT2[:, :, 0], words_BT2[:, :, 1], jnp.zeros_like(low_O), low_O
    )
    # Always drawn in float32, so that a seed gives the same noise in every dtype: 23 bits become the
    # mantissa of a number in [1, 2).
    one, tiny = np.float32(1), np.finfo(np.float32).tiny
    mantissa = ((first ^ second) >> np.uint32(9)) | one.view(np.uint32)
    uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - one
    uniform = jnp.maximum(tiny, uniform * (one - tiny) + tiny)
    return (-jnp.log(-jnp.log(uniform))).astype(dtype)


def _largest_threshold(
    keep_at_least: Callable[[list[jax.Array]], list[jax.Array]],
    example: jax.Array,
    at_once: int,
) -> jax.Array:
    """Find by bisection the largest threshold at which `keep_at_least` holds (elementwise).

    It bisects the places of floats in the order of all floats, which their bits give, so it is exact
    whatever the range of the scores. A round reads the whole vocabulary. Accelerators therefore test all
    thresholds that the next few rounds can reach in one pass, then replay these rounds on the answers,
    with the same result.

    Args:
      keep_at_least: maps thresholds to an answer for each; it holds at minus infinity.
      example: has the shape and type of the thresholds.
      at_once: rounds in one pass (`Kernels.thresholds_at_once`).
    """
    bits = jnp.finfo(example.dtype).bits
    integers = np.iinfo(f"int{bits}")

    def number(place: jax.Array) -> jax.Array:
        pattern = jnp.where(place < 0, place ^ integers.max, place)
        return lax.bitcast_convert_type(pattern, example.dtype)

    def narrow(_, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        cuts = [*bounds]
        for _ in range(at_once):
            # The mean, rounded down; the sum of both might overflow.
            middles = [(a & b) + ((a ^ b) >> 1) for a, b in itertools.pairwise(cuts)]
            cuts = [*itertools.chain(*zip(cuts, middles)), cuts[-1]]
        holds = dict(enumerate(keep_at_least([number(c) for c in cuts[1:-1]]), 1))

        def follow(first: int, last: int) -> tuple[jax.Array, jax.Array]:
            if last - first == 1:
                return cuts[first], cuts[last]
            middle = (first + last) // 2
            pick = functools.partial(jnp.where, holds[middle])
            return jax.tree.map(pick, follow(middle, last), follow(first, middle))

        return follow(0, len(cuts) - 1)

    infinity = int(np.array(np.inf, example.dtype).view(integers.dtype))
    bounds = (jnp.full(example.shape, n, integers.dtype) for n in (~infinity, infinity + 1))
    return number(lax.fori_loop(0, -(-bits // at_once), narrow, tuple(bounds))[0])


def row_sums(kernels: Kernels, arrays: list[jax.Array]) -> list[jax.Array]:
    """`Kernels.row_sum` of each; several by one reduction, which is two kernels on a GPU."""
    if len(arrays) == 1:
        return [kernels.row_sum(arrays[0])]
    zeros = tuple(jnp.zeros((), x.dtype) for x in arrays)
    add = functools.partial(jax.tree.map, jnp.add)
    sums = lax.reduce(tuple(arrays), zeros, add, (arrays[0].ndim - 1,))
    return [x[..., None] for x in sums]


@jax.named_scope("sampling")
def filtered(kernels: Kernels, logits_BMV: jax.Array, sampling: Sampling) -> jax.Array:
    """logits / T, with minus infinity for tokens dropped by top-k, top-p or min-p (in this order).

    Thresholds are found by bisection: sorting a vocabulary costs more than a decode step. Ties with
    the last kept token are kept. Rows with temperature 0 are divided by 1 and filtered as well; the
    filters always keep the largest logit.
    """
    scale_B = jnp.where(sampling.temperature_B > 0, sampling.temperature_B, 1.0)
    x = logits_BMV / scale_B.astype(logits_BMV.dtype)[:, None, None]
    x = jnp.minimum(x, jnp.finfo(x.dtype).max)  # a large bias may overflow
    minus_inf = jnp.array(-jnp.inf, x.dtype)
    top_BM1 = jnp.max(x, axis=-1, keepdims=True)

    def drop_by_rank(x: jax.Array) -> jax.Array:
        k_B = jnp.where(sampling.top_k_B > 0, sampling.top_k_B, x.shape[-1])
        k_B11 = jnp.minimum(k_B, x.shape[-1])[:, None, None]
        cut = _largest_threshold(
            lambda cuts: [
                n >= k_B11 for n in row_sums(kernels, [(x >= t).astype(int) for t in cuts])
            ],
            top_BM1,
            kernels.thresholds_at_once,
        )
        return jnp.where(x >= cut, x, minus_inf)

    # Skip filters that no row uses.
    with jax.named_scope("top_k"):
        x = lax.cond(jnp.any(sampling.top_k_B > 0), drop_by_rank, lambda x: x, x)
    weight = jnp.exp(x - top_BM1)

    def likeliest(weight: jax.Array) -> jax.Array:
        # A mass that is 0, or rounds to it, keeps the likeliest token.
        top_p_B11 = sampling.top_p_B.astype(x.dtype)[:, None, None]
        least = jnp.maximum(top_p_B11 * kernels.row_sum(weight), jnp.finfo(x.dtype).tiny)
        cut = _largest_threshold(
            lambda cuts: [
                mass >= least
                for mass in row_sums(
                    kernels, [jnp.where(weight >= t, weight, 0) for t in cuts]
                )
            ],
            top_BM1,
            kernels.thresholds_at_once,
        )
        return (weight >= cut) | (sampling.top_p_B >= 1)[:, None, None]

    everything = jnp.ones_like(weight, bool)
    with jax.named_scope("top_p"):
        any_B = jnp.any(sampling.top_p_B < 1)
        keep = lax.cond(any_B, likeliest, lambda w: everything, weight)
    keep &= weight >= sampling.min_p_B.astype(x.dtype)[:, None, None]
    return jnp.where(keep, x, minus_inf)


def log_target_probs(
    kernels: Kernels, logits_BMV: jax.Array, sampling: Sampling
) -> jax.Array:
    """log p of the token after each node: the distribution that plain sampling draws from.

    Rows of temperature 0 have all mass on the most likely token, the first among equals.
    """
    log_p_BMV = jax.nn.log_softmax(filtered(kernels, logits_BMV, sampling), axis=-1)
    token_V = jnp.arange(logits_BMV.shape[-1])
    is_best_BMV = token_V[None, None] == kernels.best_token(logits_BMV)[..., None]
    certain_BMV = jnp.where(is_best_BMV, 0.0, -jnp.inf)
    greedy_B11 = (sampling.temperature_B == 0)[:, None, None]
    return jnp.where(greedy_B11, certain_BMV.astype(log_p_BMV.dtype), log_p_BMV)
