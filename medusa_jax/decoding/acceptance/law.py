"""The distribution that plain sampling draws from."""

import jax
import jax.numpy as jnp

from medusa_jax.decoding.sampling import Sampling, best_token, filtered


def log_target_probs(logits_BMV: jax.Array, sampling: Sampling) -> jax.Array:
    """log p of the token after each node: the distribution that plain sampling draws from.

    Rows of temperature 0 have all mass on the most likely token, the first among equals.
    """
    log_p_BMV = jax.nn.log_softmax(filtered(logits_BMV, sampling), axis=-1)
    token_V = jnp.arange(logits_BMV.shape[-1])
    is_best_BMV = token_V[None, None] == best_token(logits_BMV)[..., None]
    certain_BMV = jnp.where(is_best_BMV, 0.0, -jnp.inf)
    greedy_B11 = (sampling.temperature_B == 0)[:, None, None]
    return jnp.where(greedy_B11, certain_BMV.astype(log_p_BMV.dtype), log_p_BMV)
