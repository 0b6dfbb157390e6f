"""One race: contenders decode the same prompts in interleaved rounds; figures against a baseline.

Times taken minutes apart are not comparable on a shared machine. So every contender decodes a prompt
once per round, its time is the median over rounds, and sums are over prompts.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from medusa_jax.api import Model, Options, Result
from medusa_jax.errors import UserError
from medusa_jax.progress import ProgressBar
from medusa_jax.text.repetition import mean_repeated_ngram_share
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json

# A prompt's token ids, or those of all prompts of a batch.
Task = Sequence[Any]
T = TypeVar("T")


def in_rounds(runs: Sequence[Callable[[], T]], rounds: int) -> Iterator[list[T]]:
    """Call every run once per round: other work on the machine then favours none of them.

    Yields the results of each round.
    """
    for _ in range(rounds):
        yield [run() for run in runs]


@dataclasses.dataclass(frozen=True)
class Run:
    """A batch of prompts (most often one) decoded once.

    Attributes:
      texts: new tokens of each prompt.
      prefill_seconds, decode_seconds: time to the first token, and from there to the last.
      first: number of tokens that arrive together at first (an engine with drafts may return several).
      steps: decode steps summed over the rows; 0 if the engine does not tell.
      appended: tokens that these steps appended, by the device's count.
      results: this engine's own results.
    """

    texts: list[list[int]]
    prefill_seconds: float
    decode_seconds: float
    first: int = 1
    steps: int = 0
    appended: int = 0
    results: Sequence[Result] = ()

    @classmethod
    def of(cls, results: Sequence[Result]) -> "Run":
        """The results of one batch."""
        return cls(
            [r.token_ids for r in results],
            results[0].prefill_seconds,
            results[0].decode_seconds,
            steps=sum(r.steps for r in results),
            appended=sum(n * k for r in results for n, k in enumerate(r.acceptance_histogram, 1)),
            results=results,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Tokens after the first ones: those of timed steps."""
        return sum(len(text) - self.first for text in self.texts)


@dataclasses.dataclass(frozen=True)
class Contender:
    """An engine, a drafter or a tree in the race.

    Attributes:
      decode: the ids of a prompt, or of the prompts of a batch -> decoded once.
      weights: type that weights are stored in.
      facts: further fields of its row.
      against: number of the contender that it is compared with.
    """

    label: str
    decode: Callable[[Any], Run]
    weights: str = ""
    facts: Json = dataclasses.field(default_factory=dict)
    against: int = 0


Timed = TypeVar("Timed", Run, Result)


def with_median_times(runs: Sequence[Timed]) -> Timed:
    """The first of several runs of a prompt, with the median times of all."""
    prefill, decode = (
        statistics.median(getattr(run, name) for run in runs)
        for name in ("prefill_seconds", "decode_seconds")
    )
    return dataclasses.replace(runs[0], prefill_seconds=prefill, decode_seconds=decode)


def timed_runs(
    contenders: Sequence[Contender],
    prompts: Sequence[Task],
    rounds: int,
    warm_up: bool = True,
) -> list[list[Run]]:
    """The runs of each contender, one per prompt.

    Args:
      warm_up: decode the first prompt once before anything is timed.
    """
    for contender in contenders if warm_up else ():
        contender.decode(prompts[0])
    medians: list[list[Run]] = [[] for _ in contenders]
    with ProgressBar("interleaved runs", len(prompts), "prompt") as bar:
        for prompt in prompts:
            runs = [partial(c.decode, prompt) for c in contenders]
            for one, repeats in zip(medians, zip(*in_rounds(runs, rounds)), strict=True):
                one.append(with_median_times(repeats))
            bar.update()
    return medians


def rows_of(
    contenders: Sequence[Contender],
    runs: Sequence[Sequence[Run]],
    prompts: Sequence[Task],
    questions: Sequence[int] = (),
) -> list[Json]:
    """One row of `figures` per contender, from its runs of these prompts.

    Args:
      questions: as for `figures`.

    Raises:
      UserError: every answer ended with its first token, so no step was timed.
    """
    if not all(sum(run.tokens for run in of_one) for of_one in runs):
        raise UserError(
            "every answer ended with its first token, so no step was timed: raise "
            "--max_new_tokens or use other prompts"
        )
    n_tokens = sum(np.size(np.asarray(prompt)) for prompt in prompts)
    return [
        {"label": c.label, "weights": c.weights, "prompts": len(prompts), **c.facts}
        | figures(of_one, runs[c.against], questions)
        | {
            "prompt_tokens_per_second": n_tokens
            / sum(run.prefill_seconds for run in of_one)
        }
        for c, of_one in zip(contenders, runs)
    ]


def race(
    contenders: Sequence[Contender],
    prompts: Sequence[Task],
    rounds: int,
    warm_up: bool = True,
) -> list[Json]:
    """One row of `figures` per contender; see `timed_runs` and `rows_of`."""
    return rows_of(contenders, timed_runs(contenders, prompts, rounds, warm_up), prompts)


def figures(
    ours: Sequence[Run], baseline: Sequence[Run], questions: Sequence[int] = ()
) -> Json:
    """Figures of one contender's runs against the baseline's runs of the same prompts.

    Tokens are counted in the texts; accepted lengths and steps by the device. `difference` is the
    relative error of Medusa's relation (B.1), speed-up = tokens per step / step latency ratio, so it
    reveals miscounted tokens. Times without prefill, except in `end_to_end_speedup`. Ratios without
    timed tokens are 0. The least and the median speed-up are by question, over all its turns; figures per step are None
    for an engine that does not count steps.

    Args:
      questions: the question of each run; by default each run is one.
    """
    spent, tokens, steps = _total(ours)
    base_spent, base_tokens, base_steps = _total(baseline)
    numbers = questions or range(len(ours))
    each = []
    for question in dict.fromkeys(numbers):
        turns = [i for i, number in enumerate(numbers) if number == question]
        each.append(_speedup(*([runs[i] for i in turns] for runs in (ours, baseline))))
    each = list(filter(None, each))
    timed = tokens and base_tokens
    total, base_whole = (sum(r.prefill_seconds + r.decode_seconds for r in runs) for runs in (ours, baseline))  # fmt: skip
    end_to_end = (base_whole / base_tokens) / (total / tokens) if timed else 0.0
    names = ("mean_accepted_length", "step_seconds", "step_latency_ratio", "difference")
    per_step: Sequence[float | None] = [None] * len(names)
    if steps or not tokens:
        length = sum(r.appended for r in ours) / max(1, steps)
        step = spent / max(1, steps)
        latency = step / (base_spent / max(1, base_steps))
        error = _speedup(ours, baseline) * latency / length - 1 if length else 0.0
        per_step = (length, step, latency, error)
    texts = [text for run in ours for text in run.texts]
    base_texts = [text for run in baseline for text in run.texts]
    return dict(zip(names, per_step)) | {
        "tokens": tokens,
        "speedup": _speedup(ours, baseline),
        "least_speedup": min(each, default=0.0),
        "median_speedup": statistics.median(each or [0.0]),
        "end_to_end_speedup": end_to_end,
        "tokens_per_second": tokens / spent,
        "autoregressive_tokens_per_second": base_tokens / base_spent,
        "texts": len(texts),
        "divergences": sum(a != b for a, b in zip(texts, base_texts)),
        "agreement": sum(map(agreed, texts, base_texts)) / sum(map(len, texts)),
        "repeated_4grams": mean_repeated_ngram_share(texts),
    }


def _speedup(ours: Sequence[Run], baseline: Sequence[Run]) -> float:
    """Tokens per second of decoding over the baseline's; 0 if no step was timed."""
    (spent, tokens, _), (base_spent, base_tokens, _) = _total(ours), _total(baseline)
    return base_spent / base_tokens * tokens / spent if tokens and base_tokens else 0.0


def _total(runs: Sequence[Run]) -> tuple[float, int, int]:
    """Seconds of decoding, tokens and steps."""
    seconds = sum(r.decode_seconds for r in runs)
    return seconds, sum(r.tokens for r in runs), sum(r.steps for r in runs)


def agreed(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """Number of tokens before the first difference.

    Example: [5, 6, 7], [5, 6, 9] -> 2.
    """
    pairs = zip(tokens, reference)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))


def in_batches(
    model: Model,
    tree: Tree | None,
    options: Options,
    batch: int,
    prompts: Sequence[list[int]],
) -> Run:
    """Decode all prompts, `batch` at a time, as one run; the last batch is filled up from the start.

    Example: 5 prompts, 2 at a time: [0, 1], [2, 3], [4, 0].
    """
    n, results, prefill, decode = len(prompts), [], 0.0, 0.0
    for at in range(0, n, batch):
        rows = [i % n for i in range(at, at + batch)]
        of_batch = model.generate([prompts[i] for i in rows], options, rows, tree=tree)
        prefill += of_batch[0].prefill_seconds
        decode += of_batch[0].decode_seconds
        results += of_batch
    run = Run.of(results)
    return dataclasses.replace(run, prefill_seconds=prefill, decode_seconds=decode)


def ourselves(
    model: Model,
    tree: Tree | None,
    options: Options,
    *,
    label: str = "",
    batch: int = 0,
    against: int = 0,
) -> Contender:
    """This engine: plain decoding for the empty tree, else with drafts.

    Args:
      tree: None: the model chooses in every step, as in `decode`.
      label: by default the drafter's name.
      batch: rows of the batches that prompts are decoded in; 0: a prompt at a time.
      against: as for `Contender`.
    """

    def decode(prompt: Any) -> Run:
        if batch:
            return in_batches(model, tree, options, batch, prompt)
        return Run.of(model.generate([prompt], options, tree=tree))

    shown = model.tree_at(batch or 1) if tree is None else tree
    drafter = model.drafts_by(shown) if shown.depth else "plain"
    facts = {
        "drafter": drafter,
        "tree_nodes": shown.n_nodes,
        "temperature": options.temperature,
    }
    facts |= {"batch": batch} if batch else {}
    weights = model.storage.weights or str(model.dtype)
    return Contender(label or drafter, decode, weights, facts, against)
