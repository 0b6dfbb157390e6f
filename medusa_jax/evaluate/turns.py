"""Question files with several turns: ask all of them, cut to fit, and group the answers by category."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from medusa_jax.api import Model, Options
from medusa_jax.errors import UserError
from medusa_jax.evaluate.question_files import framed
from medusa_jax.evaluate.texts import Text, answer_prompts
from medusa_jax.text.chat import PLAIN, encode_prompt
from medusa_jax.whole_files import Json

# The prompt length limit of Amphista (A.2.1).
PAPER_ROOM = 2048
# The categories of MT-bench, which Spec-Bench counts as one task.
MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip


class Turn(NamedTuple):
    """One turn of a question, answered by plain decoding.

    Attributes:
      number: of the question.
      cut: whether text of the prompt was left out.
    """

    number: int
    cut: bool
    text: Text


def answered_turns(
    model: Model, questions: Sequence[Json], template: str, room: int, options: Options
) -> list[Turn]:
    """Answer all questions turn by turn; each turn sees the earlier answers.

    Args:
      questions: from `read_questions`.
      template, room: as for `turn_prompt`.

    Returns: all first turns before the second ones.
    """
    turns: list[Turn] = []
    answers: list[list[str]] = [[] for _ in questions]
    counts = [max(1, len(question["turns"])) for question in questions]
    for turn in range(max(counts)):
        numbers = [i for i, count in enumerate(counts) if turn < count]
        prompts = [
            turn_prompt(model, questions[i], answers[i], template, room) for i in numbers
        ]
        texts = answer_prompts(model, [prompt for prompt, _ in prompts], options)
        for i, (_, cut), text in zip(numbers, prompts, texts, strict=True):
            answers[i].append(model.tokenizer.decode(text.answer))
            turns.append(Turn(i, cut, text))
    return turns


def grouped(categories: Sequence[str]) -> dict[str, list[int]]:
    """Group question numbers for the rows of a table: each category, MT-bench's eight, all.

    Example: writing math qa gives {"writing": [0], "math": [1], "qa": [2], "mt_bench": [0, 1],
    "overall": [0, 1, 2]}.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for i, category in enumerate(categories):
        groups[category].append(i)
    talks = [i for i, category in enumerate(categories) if category in MT_BENCH]
    is_mixed = len(groups) > 1
    if talks and len(talks) < len(categories):
        groups["mt_bench"] = talks
    if is_mixed:
        groups["overall"] = list(range(len(categories)))
    return dict(groups)


def prompt_room(limit: int, context: int, new_tokens: int) -> int:
    """Most tokens of a prompt: `limit`, or the papers' 2048 if it is 0, where the answer still fits.

    Raises:
      UserError: the answer takes the whole context.
    """
    room = context - new_tokens
    if room < 1:
        raise UserError(
            f"--max_new_tokens {new_tokens} leaves no room for a prompt in a context of {context}"
        )
    return min(limit or PAPER_ROOM, room)


def find_template(model: Model, name: str) -> str:
    """The template of this name; for "" the tokenizer's (""), or "plain" if it has none."""
    return name or ("" if model.tokenizer.chat_template else PLAIN)


def turn_prompt(
    model: Model, question: Json, answers: Sequence[str], template: str, room: int
) -> tuple[list[int], bool]:
    """Return the prompt ids for the next answer, and whether text was left out.

    Turn n follows the model's answers to the earlier turns. If there are more than `room` ids, the
    longest turn is shortened: an article at its end, as Amphista does; other turns in the middle,
    since passages come with their question at one end or the other.

    Args:
      answers: the model's answers to the earlier turns.
      template: a shipped chat template, "" for the tokenizer's, or "plain".

    Raises:
      UserError: too long even without that turn.
    """
    if not question["turns"]:
        return model.encode(question["prompt_ids"]), False
    turns: list[str] = question["turns"][: len(answers) + 1]
    in_frame = question["frame"] is not None
    longest = max(range(len(turns)), key=lambda i: len(turns[i]))

    def ids_with(text: str) -> list[int]:
        user_turns = [*turns[:longest], text, *turns[longest + 1 :]]
        if in_frame:
            return model.encode(framed(question, user_turns[0]))
        system = question.get("system")
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": user_turns[0]})
        for answer, turn in zip(answers, user_turns[1:], strict=True):
            messages.append({"role": "assistant", "content": answer.strip()})
            messages.append({"role": "user", "content": turn})
        if template == PLAIN:
            return model.encode("\n\n".join(message["content"] for message in messages))
        return encode_prompt(model.tokenizer, messages, template)

    ids = ids_with(turns[longest])
    if len(ids) <= room:
        return ids, False
    try:
        return shorten(model, ids_with, turns[longest], room, keep_end=not in_frame), True
    except UserError as error:
        raise UserError(f"question {question['question_id']}: {error}") from error


def shorten(
    model: Model,
    ids_with: Callable[[str], list[int]],
    text: str,
    room: int,
    *,
    keep_end: bool,
) -> list[int]:
    """Shorten `text` until `ids_with` it gives at most `room` ids; keeps its start, or both ends.

    Raises:
      UserError: more than `room` ids without any of the text.
    """
    tokens = model.tokenizer.encode(text)
    keep = len(tokens)
    while keep > 0:
        ids = ids_with(_ends(model, tokens, keep, keep_end))
        if len(ids) <= room:
            return ids
        # Shortened text may tokenise differently at the cut, so this may take another round.
        keep -= len(ids) - room
    raise UserError(f"a prompt of at most {room} tokens cannot hold it")


def _ends(model: Model, tokens: Sequence[int], keep: int, keep_end: bool) -> str:
    """Text of the first `keep` tokens, or of half as many from each end."""
    if not keep_end:
        return model.tokenizer.decode(tokens[:keep])
    end = keep // 2
    parts = (tokens[: keep - end], tokens[len(tokens) - end :])
    return " ".join(model.tokenizer.decode(part) for part in parts if part)
