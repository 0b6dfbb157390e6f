"""Compare engines on the same prompt ids, greedy, with the same number of new tokens."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from medusa_jax.api import Model, Options
from medusa_jax.tree import Tree


@dataclass(frozen=True)
class Run:
    """A prompt decoded once.

    Attributes:
      prefill_seconds: time to the first token.
      decode_seconds: time from the first to the last token.
      first: tokens that arrive with the first one (an engine with drafts may return several).
    """

    token_ids: list[int]
    prefill_seconds: float
    decode_seconds: float
    first: int = 1

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding, without prefill."""
        return (len(self.token_ids) - self.first) / self.decode_seconds


@dataclass(frozen=True)
class Contender:
    """An engine with its weights in one type.

    Attributes:
      decode: (prompt ids, n) -> greedy decoding of exactly n new tokens; end-of-text tokens are
        ignored.
    """

    engine: str
    weights: str
    decode: Callable[[Sequence[int], int], Run]


def ourselves(model: Model, tree: Tree) -> Contender:
    """This engine: plain decoding for the empty tree, else with drafts."""

    def decode(prompt: Sequence[int], n_tokens: int) -> Run:
        options = Options(max_new_tokens=n_tokens, eos_ids=())
        result = model.generate([prompt], options, tree=tree)[0]
        return Run(result.token_ids, result.prefill_seconds, result.decode_seconds)

    drafts = f"{model.drafts_by(tree)}, {tree.n_nodes} nodes"
    weights = model.storage.weights or str(model.dtype)
    return Contender(f"medusa_jax, {drafts if tree.depth else 'plain'}", weights, decode)


def side_by_side(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """One row for each contender; the first is the baseline.

    Runs of all contenders are interleaved on every prompt, `repeats` times, so that drift favours
    none. Figures are medians over the runs of a prompt, then over prompts. `agreement` is the share
    of new tokens before the first difference from the baseline.
    """
    for contender in contenders:  # warm-up
        contender.decode(prompts[0], n_tokens)
    found: list[list[list[Run]]] = []  # by prompt, contender, repeat
    for prompt in tqdm(prompts, desc="interleaved", unit="prompt", disable=None):
        rounds = [[c.decode(prompt, n_tokens) for c in contenders] for _ in range(repeats)]
        found.append([list(runs) for runs in zip(*rounds)])
    rows = []
    for i, contender in enumerate(contenders):
        runs = [by_contender[i] for by_contender in found]
        speeds = [statistics.median(r.tokens_per_second for r in row) for row in runs]
        against = [
            statistics.median(r.tokens_per_second for r in by_contender[0])
            for by_contender in found
        ]
        read = [
            len(prompt) / statistics.median(r.prefill_seconds for r in row)
            for prompt, row in zip(prompts, runs)
        ]
        same = [
            agreed(row[0].token_ids, by_contender[0][0].token_ids)
            for row, by_contender in zip(runs, found)
        ]
        rows.append(
            {
                "engine": contender.engine,
                "weights": contender.weights,
                "decode_tokens_per_second": statistics.median(speeds),
                "prompt_tokens_per_second": statistics.median(read),
                "against_plain": statistics.median(s / a for s, a in zip(speeds, against)),
                "agreement": sum(same) / (n_tokens * len(prompts)),
            }
        )
    return rows


def agreed(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Number of tokens before the first difference.

    Example: [5, 6, 7], [5, 6, 9] -> 2.
    """
    pairs = zip(tokens, others)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
