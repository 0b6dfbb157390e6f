"""The tie report: prompts decoded drafted and plainly, and whether rounding explains divergences."""

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext

from tqdm import tqdm

from medusa_jax.api import Model, Options
from medusa_jax.api.asking import equal_batches
from medusa_jax.console import announced
from medusa_jax.evaluate.compare import Comparison, compare
from medusa_jax.whole_files import Json
from research.noise import Noise, noise_at

# Both texts of a prompt, and the noise where they diverge.
Judged = tuple[Comparison, Noise | None]


def compare_batches(
    model: Model, prompts: Sequence[list[int]], options: Options, batch_size: int
) -> list[Judged]:
    """Decode every prompt with the model's tree and plainly, as request 0, 1, ..."""

    def judge(one: Comparison, row: int) -> Judged:
        if one.divergence is None:
            return one, None
        theirs = one.autoregressive.token_ids
        given = prompts[row], theirs, one.divergence, options, row, model.tree
        return one, noise_at(model, *given)

    found: list[Judged] = []
    for ids, rows in tqdm([*equal_batches(len(prompts), batch_size)], unit="batch", disable=None):  # fmt: skip
        batch = [prompts[i] for i in rows]
        with nullcontext() if found else announced("compiling"):
            compared = compare(model, batch, options, tree=model.tree, ids=rows, repeats=1)
        found += map(judge, compared[: len(ids)], rows)
    return found


def tie_report(
    model: Model, options: Options, compared: Sequence[tuple[str, Judged]]
) -> Json:
    """All first divergences, and the number that rounding does not explain.

    Args:
      compared: names of the prompts, and both texts of each.
    """
    parted = [
        (name, one.divergence, noise)
        for name, (one, noise) in compared
        if one.divergence and noise
    ]
    # Tokens after a divergence are not comparable, so they are not counted.
    tokens = sum(
        one.divergence.position + 1 if one.divergence else one.autoregressive.new_tokens
        for _, (one, _) in compared
    )
    return {
        "dtype": str(model.dtype),
        "tree_nodes": model.tree.n_nodes,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "prompts": len(compared),
        "tokens_compared": tokens,
        "divergences": [
            {"prompt": name, **dataclasses.asdict(where), **noise._asdict()}
            | {"is_tie": noise.is_tie}
            for name, where, noise in parted
        ],
        "divergences_per_token": len(parted) / max(1, tokens),
        "prompts_that_diverge": len(parted) / len(compared),
        "not_explained": sum(not noise.is_tie for *_, noise in parted),
    }
