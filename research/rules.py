"""Accepted length and text quality of an acceptance rule on a set of prompts (Medusa figure 5)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import Model, Options
from medusa_jax.api.asking import equal_batches
from medusa_jax.decoding.generate import power_of_two
from medusa_jax.heads.drafter import Backbone
from medusa_jax.whole_files import Json


def measure_rule(
    model: Model,
    prompts: Sequence[list[int]],
    acceptance: str,
    options: Options,
    batch_size: int,
) -> Json:
    """Tokens per step, and mean log-probability of the text under the backbone."""
    steps = appended = 0
    log_p: list[np.ndarray] = []
    for ids, rows in equal_batches(len(prompts), batch_size):
        batch = [prompts[i] for i in rows]
        results = model.generate(batch, options, rows, acceptance=acceptance)
        for i, result in zip(ids, results):
            steps += result.steps
            appended += result.new_tokens - 1
            log_p.append(log_probabilities(model, prompts[i], result.token_ids))
    typical = acceptance == "typical"
    return {
        "acceptance": acceptance,
        "temperature": options.temperature,
        "epsilon": options.epsilon if typical else None,
        "delta": options.delta if typical else None,
        "mean_accepted_length": appended / max(1, steps),
        "mean_log_probability": float(np.concatenate(log_p).mean()),
        "tokens": appended + len(prompts),
    }


def log_probabilities(
    model: Model, prompt: Sequence[int], tokens: Sequence[int]
) -> np.ndarray:
    """log p(token | everything before it) of each token after the prompt, at temperature 1.

    One teacher-forced pass over prompt and tokens.
    """
    text = [*prompt, *tokens]
    padded = np.zeros((1, power_of_two(len(text), 64)), np.int32)
    padded[0, : len(text)] = text
    return np.asarray(_log_p(model.backbone, padded))[0, len(prompt) - 1 : len(text) - 1]


@jax.jit
def _log_p(backbone: Backbone, tokens_BT: jax.Array) -> jax.Array:
    """log p of token t + 1 at index t [B, T]; the last column is meaningless."""
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    hidden_BTD = backbone.forward(tokens_BT, positions_BT, jnp.ones_like(tokens_BT))
    logits_BTV = backbone.lm_head(hidden_BTD)
    next_BT1 = jnp.roll(tokens_BT, -1, axis=1)[..., None]
    own_BT = jnp.take_along_axis(logits_BTV, next_BT1, axis=-1)[..., 0]
    return own_BT - jax.nn.logsumexp(logits_BTV, axis=-1)
