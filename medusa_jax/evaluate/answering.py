"""Answer a question file with a drafter and by plain decoding: figures by category and overall."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from medusa_jax.api import Model, Options
from medusa_jax.evaluate import scores
from medusa_jax.evaluate.answers import answer_line, spec_bench_speedup
from medusa_jax.evaluate.compare import Comparison, compare
from medusa_jax.evaluate.conversation import Turn, all_turns, ending_turns
from medusa_jax.evaluate.questions import grouped
from medusa_jax.evaluate.race import Run, figures, relation_error, step_seconds
from medusa_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Answered:
    """A question with the drafted and the plain answers to its turns.

    Attributes:
      temperature: sampling temperature of the answers.
    """

    question: dict[str, Any]
    turns: list[Turn[Comparison]]
    temperature: float

    @property
    def compared(self) -> list[Comparison]:
        """Both answers to each turn."""
        return [turn.outcome for turn in self.turns]


def answer_all(
    model: Model,
    questions: Sequence[dict[str, Any]],
    tree: Tree,
    options: Options,
    *,
    repeats: int,
    template: str,
    room: int,
    temperatures: Mapping[str, float] | None = None,
) -> list[Answered]:
    """Answer every turn of every question with the tree and without, interleaved.

    Both prompts of a later turn contain the drafted answers to the earlier turns.

    Args:
      template, room: as for `conversation.turn_prompt`.
      temperatures: category -> temperature, where it differs from the options'.
    """
    options = ending_turns(model, options, template)
    own = [
        (temperatures or {}).get(question["category"], options.temperature)
        for question in questions
    ]

    def ask(
        prompts: list[list[int]], numbers: list[int]
    ) -> Iterator[tuple[Comparison, str]]:
        bar = tqdm(numbers, desc=f"{tree.n_nodes} nodes", unit="turn", disable=None)
        for prompt, i in zip(prompts, bar):
            asked = dataclasses.replace(options, temperature=own[i])
            [one] = compare(model, [prompt], asked, tree=tree, ids=[i], repeats=repeats)
            yield one, one.drafted.text

    turns = all_turns(model, questions, template, room, ask)
    return [
        Answered(question, [t for t in turns if t.number == i], own[i])
        for i, question in enumerate(questions)
    ]


def category_rows(
    model: Model, answered: Sequence[Answered], tree: Tree, repeats: int
) -> list[dict[str, Any]]:
    """A row per category in the order of the file, one for MT-bench's eight, and one for all."""
    groups = grouped([one.question["category"] for one in answered])
    return [
        {"category": category}
        | category_row(model, [answered[i] for i in own], tree, repeats)
        for category, own in groups.items()
    ]


def category_row(
    model: Model, answered: Sequence[Answered], tree: Tree, repeats: int
) -> dict[str, Any]:
    """Figures of some questions: `race.figures`, Spec-Bench's speed-up, scores, and two checks.

    Both checks are relative errors of Medusa's relation (B.1). `difference` uses the latency of the
    answers themselves, so it reveals miscounted tokens. `difference_apart` uses a step timed in
    isolation, in the middle of a text of median length, so it reveals the cost of other work and of
    other text lengths.
    """
    compared = [both for one in answered for both in one.compared]
    drafted, plain = (
        [answer_line(one.question, one.compared, "", plain=side) for one in answered]
        for side in (False, True)
    )
    row = figures(
        [Run.of([both.drafted]) for both in compared],
        [Run.of([both.autoregressive]) for both in compared],
    )
    apart = step_ratio(model, answered, tree, repeats)
    histograms = [both.drafted.acceptance_histogram for both in compared]
    gaps = [both.divergence.facts() for both in compared if both.divergence]
    return row | {
        "questions": len(answered),
        "turns": len(compared),
        "acceptance_histogram": np.sum(histograms, axis=0).tolist(),
        "divergence_gaps": gaps,
        "spec_bench_speedup": spec_bench_speedup(
            drafted, plain, lambda text: model.tokenizer.encode(text, add_bos=True)
        ),
        "step_latency_ratio_apart": apart,
        "difference_apart": relation_error(
            row["speedup"], row["mean_accepted_length"], apart
        ),
        "cut": sum(any(turn.cut for turn in one.turns) for one in answered),
        "scores": score(answered),
    }


def step_ratio(
    model: Model, answered: Sequence[Answered], tree: Tree, rounds: int
) -> float:
    """Seconds of a step with the tree over those of a plain step, from interleaved runs.

    Steps are timed after the prompt and half the answer of the text of median length, at the highest
    temperature of these questions.
    """
    texts = [
        turn.prompt + drafted.token_ids[: drafted.new_tokens // 2]
        for one in answered
        for turn in one.turns
        for drafted in [turn.outcome.drafted]
    ]
    middle = sorted(texts, key=len)[len(texts) // 2]
    temperature = max(one.temperature for one in answered)
    acceptance = "sampled" if temperature > 0 else "greedy"
    with_tree, without = step_seconds(
        model, [tree, Tree.none()], middle, acceptance=acceptance,
        temperature=temperature, rounds=max(7, rounds),
    )  # fmt: skip
    return with_tree / without


def score(answered: Sequence[Answered]) -> dict[str, dict[str, float]]:
    """Mean scores of the drafted and the plain answers, over questions with references.

    Exact match if a reference ends with GSM8K's mark, else ROUGE if `rouge-score` is installed.
    Conversations of several turns are not scored; they are for judges.

    Returns: score -> {"drafted": ..., "plain": ..., "questions": number of scored questions}.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for one in answered:
        kind = scores.kind_of(one.question)
        if not kind or (kind == scores.ROUGE and not scores.has_rouge()):
            continue
        [right], [both] = one.question["references"], one.compared
        sides = [scores.score(kind, side.text, right) for side in (both.drafted, both.autoregressive)]  # fmt: skip
        for name in sides[0]:
            found.setdefault(name, []).append((sides[0][name], sides[1][name]))
    return {
        name: {
            "drafted": statistics.fmean(ours for ours, _ in pairs),
            "plain": statistics.fmean(theirs for _, theirs in pairs),
            "questions": len(pairs),
        }
        for name, pairs in found.items()
    }
