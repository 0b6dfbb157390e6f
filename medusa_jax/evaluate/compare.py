"""Speculative against autoregressive decoding of the same requests, with the same engine, in one run."""

import dataclasses
from collections.abc import Sequence

from medusa_jax.api import Model, Options, Result
from medusa_jax.api.prompts import Prompt
from medusa_jax.evaluate.divergence import Divergence, find_divergence
from medusa_jax.evaluate.race import Run, figures, in_rounds, with_median_times
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One request decoded both ways; times are medians over interleaved runs of the batch.

    Attributes:
      divergence: where the drafted text diverges from the plain one; None if it does not.
    """

    drafted: Result
    autoregressive: Result
    divergence: Divergence | None

    @property
    def identical(self) -> bool:
        return self.drafted.token_ids == self.autoregressive.token_ids

    @property
    def speedup(self) -> float | None:
        """Autoregressive over speculative seconds per token; None without steps."""
        return self.facts()["speedup"]

    @property
    def step_latency_ratio(self) -> float | None:
        """Seconds per speculative step over seconds per autoregressive step; None without steps."""
        return self.facts()["step_latency_ratio"]

    def facts(self) -> Json:
        """The fields that `--compare` adds to the JSON object; ratios are None without steps."""
        baseline, where = self.autoregressive, self.divergence
        ratios = figures([Run.of([self.drafted])], [Run.of([baseline])])
        has_steps = self.drafted.steps and baseline.steps
        return {
            "autoregressive": {
                "token_ids": baseline.token_ids,
                "decode_seconds": baseline.decode_seconds,
                "tokens_per_second": baseline.tokens_per_second,
            },
            "speedup": ratios["speedup"] if has_steps else None,
            "step_latency_ratio": ratios["step_latency_ratio"] if has_steps else None,
            "identical": self.identical,
            "first_divergence": where and where.facts(),
        }


def compare(
    model: Model,
    prompts: Sequence[Prompt],
    options: Options | Sequence[Options],
    *,
    ids: Sequence[int] | None = None,
    repeats: int = 3,
    tree: str | Tree | None = None,
    acceptance: str = "auto",
) -> list[Comparison]:
    """Decode with drafts and without, `repeats` interleaved runs of each; `ids` as for `Model.generate`.

    With a lossy acceptance rule the autoregressive runs use plain sampling (or greedy decoding).
    """
    rows = list(options) if isinstance(options, Sequence) else [options] * len(prompts)
    sides = [
        lambda: model.generate(prompts, options, ids, tree=tree, acceptance=acceptance),
        lambda: model.generate(prompts, options, ids, tree=Tree.none()),
    ]
    drafted, plain = (
        [with_median_times(request_runs) for request_runs in zip(*runs)]
        for runs in zip(*in_rounds(sides, max(1, repeats)))
    )
    comparisons = []
    for i, (ours, theirs) in enumerate(zip(drafted, plain)):
        where = None
        if ours.token_ids != theirs.token_ids:
            where = find_divergence(
                model, model.encode(prompts[i]), ours.token_ids, theirs.token_ids, rows[i],
                ids[i] if ids else i,
            )  # fmt: skip
        comparisons.append(Comparison(ours, theirs, where))
    return comparisons
