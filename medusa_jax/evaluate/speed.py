"""Measure a drafter with a tree on a question file, against plain decoding."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from medusa_jax.api import Model, Options
from medusa_jax.errors import UserError
from medusa_jax.evaluate.answers import answer_line
from medusa_jax.evaluate.compare import Comparison, compare
from medusa_jax.evaluate.questions import prompt_of
from medusa_jax.repetition import mean_repeated_ngram_share
from medusa_jax.tree import Tree


def drafting_row(
    model: Model,
    questions: Sequence[dict[str, Any]],
    tree: Tree,
    options: Options,
    repeats: int,
) -> dict[str, Any]:
    """One row of the table: `model` with `tree` on all questions, against plain decoding.

    Times are medians of `repeats` interleaved runs of a prompt; `answers` are lines of Spec-Bench's
    answer files.
    """
    compared: list[Comparison] = []
    for question in tqdm(
        questions, desc=f"{tree.n_nodes} nodes", unit="prompt", disable=None
    ):
        compared += compare(
            model, [prompt_of(question)], options, tree=tree, repeats=repeats
        )
    figures = pooled(compared)
    outputs = [c.drafted.token_ids for c in compared]
    real = [q["continuation_ids"] for q in questions if "continuation_ids" in q]
    pairs = list(zip(outputs, real))
    whole = [sum(r.prefill_seconds + r.decode_seconds for r in side) for side in (
        [c.autoregressive for c in compared], [c.drafted for c in compared]
    )]  # fmt: skip
    plain_tokens = timed(sum(c.autoregressive.new_tokens - 1 for c in compared))
    speedups = [c.speedup for c in compared if c.speedup is not None]
    end_to_end = (whole[0] / plain_tokens) / (whole[1] / timed(figures["tokens"]))
    ideal = figures["mean_accepted_length"] / figures["step_latency_ratio"]
    name = f"{model.drafts_by(tree)}-{tree.n_nodes}"
    return {
        "drafter": model.drafts_by(tree),
        "tree_nodes": tree.n_nodes,
        "temperature": options.temperature,
        "prompts": len(compared),
        **figures,
        "speedup_median_prompt": statistics.median(speedups or [0.0]),
        # Single runs, with prefill and host work; efficiency is relative to tokens per step / latency.
        "end_to_end_speedup": end_to_end,
        "efficiency": end_to_end / ideal,
        "repeated_4grams": mean_repeated_ngram_share(outputs),
        "repeated_4grams_real": mean_repeated_ngram_share([r[: len(o)] for o, r in pairs])
        if pairs
        else None,
        "answers": [answer_line(q, [c], name) for q, c in zip(questions, compared)],
    }


def timed(tokens: int) -> int:
    """Return `tokens`, the number of tokens from timed steps, if there are any.

    Raises:
      UserError: there are none: every answer ended with its first token, which comes from prefill.
    """
    if not tokens:
        raise UserError(
            "every answer ended with its first token, so no step was timed: raise "
            "--max_new_tokens or use other prompts"
        )
    return tokens


def pooled(compared: Sequence[Comparison]) -> dict[str, Any]:
    """Tokens, seconds and their ratios summed over all comparisons; decoding only.

    Tokens are counted in the texts, steps in the acceptance histograms of the device.
    """
    drafted, plain = [c.drafted for c in compared], [c.autoregressive for c in compared]
    histogram = np.sum([r.acceptance_histogram for r in drafted], axis=0)
    steps, plain_steps = (max(1, sum(r.steps for r in side)) for side in (drafted, plain))
    appended, plain_tokens = (
        sum(r.new_tokens - 1 for r in side) for side in (drafted, plain)
    )
    seconds = sum(c.decode_seconds for c in compared)
    plain_seconds = sum(c.autoregressive_seconds for c in compared)
    both = appended and plain_tokens
    return {
        "tokens": appended,
        "mean_accepted_length": float(histogram @ np.arange(1, len(histogram) + 1)) / steps,
        "acceptance_histogram": histogram.tolist(),
        "step_latency_ratio": (seconds / steps) / (plain_seconds / plain_steps),
        "speedup": (plain_seconds / plain_tokens) / (seconds / appended) if both else 0.0,
        "tokens_per_second": appended / seconds,
        "autoregressive_tokens_per_second": plain_tokens / plain_seconds,
        "divergences": sum(not c.identical for c in compared),
        "divergence_gaps": [c.first_divergence for c in compared if c.first_divergence],
    }
