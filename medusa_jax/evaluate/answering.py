"""Answer a question file with a drafter and by plain decoding: figures by category and overall."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from medusa_jax.api import Model, Options
from medusa_jax.evaluate import scores
from medusa_jax.evaluate.answers import answer_line, spec_bench_speedup
from medusa_jax.evaluate.compare import Comparison, compare
from medusa_jax.evaluate.conversation import ending_turns, turn_prompt
from medusa_jax.evaluate.latency import step_seconds
from medusa_jax.evaluate.questions import grouped
from medusa_jax.evaluate.speed import pooled
from medusa_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Answered:
    """A question with the drafted and the plain answers, turn by turn.

    Attributes:
      prompts: prompt ids of each turn, the same for both answers.
      cut: whether text of the question was left out.
      temperature: sampling temperature of the answers.
    """

    question: dict[str, Any]
    turns: list[Comparison]
    prompts: list[list[int]]
    cut: bool
    temperature: float


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
    found = []
    for number, question in enumerate(
        tqdm(questions, desc=f"{tree.n_nodes} nodes", unit="question", disable=None)
    ):
        turns: list[Comparison] = []
        prompts: list[list[int]] = []
        cut = False
        own = (temperatures or {}).get(question["category"], options.temperature)
        asked = dataclasses.replace(options, temperature=own)
        for _ in question["turns"] or [""]:
            answers = [turn.drafted.text for turn in turns]
            prompt, shortened = turn_prompt(model, question, answers, template, room)
            turns += compare(
                model, [prompt], asked, tree=tree, ids=[number], repeats=repeats
            )
            prompts.append(prompt)
            cut = cut or shortened
        found.append(Answered(question, turns, prompts, cut, own))
    return found


def category_rows(
    model: Model,
    answered: Sequence[Answered],
    tree: Tree,
    repeats: int,
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
    """Figures of some questions: `speed.pooled`, Spec-Bench's speed-up, scores, and two checks.

    Both checks are relative errors of Medusa's relation (B.1), speed-up = tokens per step / step
    latency ratio. `difference` uses the latency of the answers themselves; tokens are counted in
    the texts and steps by the device, so it reveals miscounted tokens. `difference_apart` uses a
    step timed in isolation, in the middle of a text of median length, so it reveals the cost of
    other work and of other text lengths.
    """
    compared = [turn for one in answered for turn in one.turns]
    row: dict[str, Any] = {"questions": len(answered), "turns": len(compared)}
    row |= pooled(compared)
    lines = [
        [answer_line(one.question, one.turns, "", plain=plain) for one in answered]
        for plain in (False, True)
    ]
    drafted, plain = lines
    row["spec_bench_speedup"] = spec_bench_speedup(
        drafted, plain, lambda text: model.tokenizer.encode(text, add_bos=True)
    )
    length = row["mean_accepted_length"]
    apart = step_ratio(model, answered, tree, repeats)
    return row | {
        "step_latency_ratio_apart": apart,
        "difference": off(row["speedup"], length, row["step_latency_ratio"]),
        "difference_apart": off(row["speedup"], length, apart),
        "cut": sum(one.cut for one in answered),
        "scores": score(answered),
    }


def off(speedup: float, length: float, ratio: float) -> float:
    """speedup / (length / ratio) - 1; 0 if the answers end without a step."""
    return speedup * ratio / length - 1 if length else 0.0


def step_ratio(
    model: Model, answered: Sequence[Answered], tree: Tree, rounds: int
) -> float:
    """Seconds of a step with the tree over those of a plain step, from interleaved runs.

    Steps are timed after the prompt and half the answer of the text of median length, at the highest
    temperature of these questions.
    """
    texts = [
        prompt + turn.drafted.token_ids[: turn.drafted.new_tokens // 2]
        for one in answered
        for prompt, turn in zip(one.prompts, one.turns, strict=True)
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
        if not kind:
            continue
        [turn] = one.turns
        texts = turn.drafted.text, turn.autoregressive.text
        [right] = one.question["references"]
        if kind == scores.EXACT_MATCH:
            ours, theirs = (scores.exact_match(text, right) for text in texts)
            found.setdefault(kind, []).append((ours, theirs))
        elif scores.has_rouge():
            both = [scores.rouge(text, right) for text in texts]
            for name in scores.ROUGES:
                found.setdefault(name, []).append((both[0][name], both[1][name]))
    return {
        name: {
            "drafted": statistics.fmean(ours for ours, _ in pairs),
            "plain": statistics.fmean(theirs for _, theirs in pairs),
            "questions": len(pairs),
        }
        for name, pairs in found.items()
    }
