"""Accepted length and text quality of an acceptance rule on a set of prompts (Medusa figure 5)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from medusa_jax.api import Model, Options
from medusa_jax.api.batching import equal_batches
from medusa_jax.evaluate.likelihood import log_probabilities


def measure_rule(
    model: Model,
    prompts: Sequence[list[int]],
    acceptance: str,
    options: Options,
    batch_size: int,
) -> dict[str, Any]:
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
