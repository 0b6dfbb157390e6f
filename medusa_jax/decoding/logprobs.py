"""Log-probabilities of the emitted tokens, and of the most likely alternatives.

They are computed from the verifier's logits at temperature 1, before any filter, and need no extra pass.
Tokens barred by `no_repeat_ngram_size` have minus infinity. An engine without log-probabilities stores
none.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from medusa_jax.model.product import at_least_f32


class Logprobs(struct.PyTreeNode):
    """Log-probabilities in nats of O tokens of every row.

    Attributes:
      token_BO: log p of each token.
      best_BON, best_ids_BON: the N largest log-probabilities at its place, descending, and their
        tokens. N may be 0.
    """

    token_BO: jax.Array
    best_BON: jax.Array
    best_ids_BON: jax.Array


def logprobs_of(logits_BLV: jax.Array, tokens_BL: jax.Array, n: int) -> Logprobs:
    """log softmax of the logits at `tokens_BL`, and its `n` largest with their tokens.

    Example: logits [log 6, log 3, log 1] and token 1, n = 2: log 0.3; [log 0.6, log 0.3], [0, 1].
    """
    logits_BLV = logits_BLV.astype(at_least_f32(logits_BLV.dtype))
    log_p_BLV = jax.nn.log_softmax(logits_BLV, axis=-1)
    token_BL = jnp.take_along_axis(log_p_BLV, tokens_BL[..., None], axis=-1)[..., 0]
    # A TPU sorts all scores of an array of more than two axes.
    best = lax.top_k(log_p_BLV.reshape(-1, log_p_BLV.shape[-1]), n)
    return Logprobs(token_BL, *(x.reshape(*tokens_BL.shape, n) for x in best))
