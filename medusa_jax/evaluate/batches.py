"""The best tree for each batch size, and the throughput of decoding B rows at a time."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from medusa_jax.api import Model, Options, device_tree
from medusa_jax.errors import UserError
from medusa_jax.evaluate.speed import timed
from medusa_jax.tree import Tree, tree_of_size


def fitted_tree(model: Model, batch: int, most_nodes: int) -> tuple[Tree, dict[str, Any]]:
    """The tree with the most tokens per second at this batch size, and its measurements.

    Raises:
      UserError: the heads have no calibrated tree with evidence.
    """
    calibrated = model.calibrated or {}
    if not device_tree.tokens_by_size(calibrated, "cpu"):
        raise UserError(
            "fitting the tree to a batch needs a calibrated tree with evidence next to the "
            "heads: run `python -m medusa_jax calibrate`"
        )
    figures = device_tree.measure_rung(model, calibrated, batch, most_nodes)
    return tree_of_size(calibrated["growth"], figures["nodes"]), figures


def batch_rows(
    model: Model,
    prompts: Sequence[Sequence[int]],
    options: Options,
    batches: Sequence[int],
    *,
    repeats: int = 3,
    most_nodes: int = 16,
) -> list[dict[str, Any]]:
    """Speed of every batch size with its fitted tree, against plain decoding in equal batches.

    Prompts are cut to one length and end-of-text tokens are ignored, so all rows of a batch have the
    same length. Runs of all batch sizes, drafted and plain, are interleaved; times are medians.
    """
    options = dataclasses.replace(options, eos_ids=())
    length = min(map(len, prompts))
    prompts = [list(p[-length:]) for p in prompts]
    trees, figures = {}, {}
    for batch in batches:
        trees[batch], figures[batch] = fitted_tree(model, batch, most_nodes)
    seconds: dict[tuple[int, str], list[float]] = {}
    measured: dict[int, tuple[int, int, int, int]] = {}
    for _ in range(repeats):
        for batch in batches:
            spent = {"drafted": 0.0, "plain": 0.0}
            steps = tokens = differing = 0
            groups = _groups(len(prompts), batch)
            for rows in groups:
                group = [prompts[i] for i in rows]
                ours = model.generate(group, options, rows, tree=trees[batch])
                theirs = model.generate(group, options, rows, tree=Tree.none())
                spent["drafted"] += ours[0].decode_seconds
                spent["plain"] += theirs[0].decode_seconds
                steps += sum(r.steps for r in ours)
                tokens += sum(r.new_tokens - 1 for r in ours)
                differing += sum(a.token_ids != b.token_ids for a, b in zip(ours, theirs))
            for side, value in spent.items():
                seconds.setdefault((batch, side), []).append(value)
            measured[batch] = (steps, timed(tokens), differing, len(groups) * batch)
    out: list[dict[str, Any]] = []
    for batch in batches:
        steps, tokens, differing, texts = measured[batch]
        drafted = statistics.median(seconds[batch, "drafted"])
        plain = statistics.median(seconds[batch, "plain"])
        out.append(
            {
                "batch": batch,
                "tree_nodes": trees[batch].n_nodes,
                "mean_accepted_length": tokens / max(1, steps),
                "tokens": tokens,
                "tokens_per_second": tokens / drafted,
                "autoregressive_tokens_per_second": tokens / plain,
                "speedup": plain / drafted,
                "divergences": differing,
                "texts": texts,
                "fit": figures[batch],
            }
        )
    for row in out:
        row["against_first_batch"] = row["tokens_per_second"] / out[0]["tokens_per_second"]
    return out


def _groups(n: int, batch: int) -> list[list[int]]:
    """0, ..., n - 1 in groups of `batch`, the last filled up from the start again.

    Example: 5 in groups of 2: [0, 1], [2, 3], [4, 0].
    """
    return [[i % n for i in range(at, at + batch)] for at in range(0, n, batch)]
