"""Question files with several turns: ask all of them, and group the answers by category."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from medusa_jax.api import Model, Options
from medusa_jax.evaluate.recording import Text, own_texts
from medusa_jax.whole_files import Json
from research.asking import turn_prompt

# The categories of MT-bench, which Spec-Bench counts as one task.
MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip

Outcome = TypeVar("Outcome")


class Turn(NamedTuple, Generic[Outcome]):
    """One turn of a question, answered.

    Attributes:
      number: of the question.
      turn: number of the turn, from 0.
      cut: whether text of the prompt was left out.
    """

    number: int
    turn: int
    prompt: list[int]
    cut: bool
    outcome: Outcome


def all_turns(
    model: Model,
    questions: Sequence[Json],
    template: str,
    room: int,
    ask: Callable[[list[list[int]]], Iterable[tuple[Outcome, str]]],
) -> list[Turn[Outcome]]:
    """Ask all questions turn by turn; each turn sees the earlier answers.

    Args:
      template, room: as for `turn_prompt`.
      ask: prompts -> an outcome and an answer for each.

    Returns: all first turns before the second ones.
    """
    found: list[Turn[Outcome]] = []
    answers: list[list[str]] = [[] for _ in questions]
    turns = [max(1, len(question["turns"])) for question in questions]
    for turn in range(max(turns)):
        left = [i for i, own in enumerate(turns) if turn < own]
        prompts = [
            turn_prompt(model, questions[i], answers[i], template, room) for i in left
        ]
        outcomes = ask([ids for ids, _ in prompts])
        for i, prompt, (outcome, answer) in zip(left, prompts, outcomes, strict=True):
            answers[i].append(answer)
            found.append(Turn(i, turn, *prompt, outcome))
    return found


def answered_turns(
    model: Model, questions: Sequence[Json], template: str, room: int, options: Options
) -> list[Turn[Text]]:
    """Answer every turn of every question by plain decoding; arguments as of `all_turns`."""

    def ask(prompts: list[list[int]]) -> list[tuple[Text, str]]:
        texts = own_texts(model, prompts, options)
        return [(x, model.tokenizer.decode(x.ids[x.n_prompt :])) for x in texts]

    return all_turns(model, questions, template, room, ask)


def grouped(categories: Sequence[str]) -> dict[str, list[int]]:
    """Group question numbers for the rows of a table: each category, MT-bench's eight, all.

    Example: writing math qa gives {"writing": [0], "math": [1], "qa": [2], "mt_bench": [0, 1],
    "overall": [0, 1, 2]}.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for i, category in enumerate(categories):
        groups[category].append(i)
    talks = [i for i, category in enumerate(categories) if category in MT_BENCH]
    several = len(groups) > 1
    if talks and len(talks) < len(categories):
        groups["mt_bench"] = talks
    if several:
        groups["overall"] = list(range(len(categories)))
    return dict(groups)
