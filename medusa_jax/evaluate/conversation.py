"""From a question to the ids that a model reads: chat templates, earlier answers, truncation."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from medusa_jax.api import Model, Options, asking
from medusa_jax.errors import UserError
from medusa_jax.evaluate.questions import framed, prompt_of
from medusa_jax.interop.chat import encode_prompt

# Instead of a template: turns and answers one behind the other, with an empty line between.
PLAIN = "plain"
# The length that Amphista (A.2.1) cuts prompts to.
PAPER_ROOM = 2048

Came = TypeVar("Came")


def find_template(model: Model, asked: str) -> str:
    """The template that "auto" means: the tokenizer's own (""), or none at all ("plain")."""
    if asked != "auto":
        return asked
    return "" if model.tokenizer.chat_template else PLAIN


def ending_turns(model: Model, options: Options, template: str) -> Options:
    """Options whose text ends where the chat template ends a turn, unless they say where."""
    if template == PLAIN:
        return options
    return asking.ending_turns(model.tokenizer, model.eos_ids, options, template)


def asked(model: Model, record: dict[str, Any], template: str = "") -> str | list[int]:
    """The prompt of a record; of a conversation, all up to its last user turn, for an answer.

    Raises:
      UserError: a conversation that the template refuses, or without a user turn.
    """
    if "messages" not in record:
        return prompt_of(record)
    messages = record["messages"]
    users = [i for i, said in enumerate(messages) if said.get("role") == "user"]
    if not users:
        raise UserError("a conversation without a user turn leaves nothing to answer")
    return encode_prompt(model.tokenizer, messages[: users[-1] + 1], template)


def turn_prompt(
    model: Model,
    question: dict[str, Any],
    answers: Sequence[str],
    template: str,
    room: int,
) -> tuple[list[int], bool]:
    """Ids of a question up to where its next answer begins, and whether text was left out.

    Turn n follows the model's own answers to the turns before it. Where there are more than
    `room` ids, the longest of the turns is cut: an article at its end, as Amphista does; else in
    its middle, since passages come with their question at one end or the other.

    Args:
      answers: the model's, as many as turns lie behind.
      template: a shipped chat template, "" for the tokenizer's own, or "plain".

    Raises:
      UserError: too long even without that turn.
    """
    if "prompt_ids" in question:
        return model.encode(question["prompt_ids"]), False
    turns: list[str] = question["turns"][: len(answers) + 1]
    in_frame = question["frame"] is not None
    longest = max(range(len(turns)), key=lambda i: len(turns[i]))

    def ids_with(text: str) -> list[int]:
        said = [*turns[:longest], text, *turns[longest + 1 :]]
        if in_frame:
            return model.encode(framed(question, said[0]))
        lines = [said[0]]
        messages = [{"role": "user", "content": said[0]}]
        for answer, turn in zip(answers, said[1:], strict=True):
            lines += [answer.strip(), turn]
            messages.append({"role": "assistant", "content": answer.strip()})
            messages.append({"role": "user", "content": turn})
        if template == PLAIN:
            return model.encode("\n\n".join(lines))
        return encode_prompt(model.tokenizer, messages, template)

    whole = ids_with(turns[longest])
    if len(whole) <= room:
        return whole, False
    try:
        return cut(model, ids_with, turns[longest], room, keep_end=not in_frame), True
    except UserError as error:
        raise UserError(f"question {question['question_id']}: {error}") from error


def all_turns(
    model: Model,
    questions: Sequence[dict[str, Any]],
    template: str,
    room: int,
    ask: Callable[[list[list[int]], list[str]], Sequence[tuple[Came, str]]],
) -> list[tuple[int, Came]]:
    """Every turn of every question behind the answers to the turns before it, a turn of all at a time.

    Args:
      template, room: as for `turn_prompt`.
      ask: (prompts, what each turn is called) -> what came of each, and its answer.

    Returns: numbers of questions and what came of a turn; first turns before the second ones.
    """
    found: list[tuple[int, Came]] = []
    answers: list[list[str]] = [[] for _ in questions]
    turns = [max(1, len(question["turns"])) for question in questions]
    for turn in range(max(turns)):
        left = [i for i, own in enumerate(turns) if turn < own]
        prompts = [
            turn_prompt(model, questions[i], answers[i], template, room)[0] for i in left
        ]
        names = [f"{questions[i]['question_id']}, turn {turn + 1}" for i in left]
        for i, (came, answer) in zip(left, ask(prompts, names), strict=True):
            answers[i].append(answer)
            found.append((i, came))
    return found


def cut(
    model: Model,
    ids_with: Callable[[str], list[int]],
    text: str,
    room: int,
    *,
    keep_end: bool,
) -> list[int]:
    """`ids_with` so much of `text` that they are at most `room`: its start, or both its ends.

    Raises:
      UserError: nothing of the text is left and they are still too many.
    """
    tokens = model.tokenizer.encode(text)
    keep = len(tokens)
    while keep > 0:
        ids = ids_with(_ends(model, tokens, keep, keep_end))
        if len(ids) <= room:
            return ids
        # Text that is cut is tokenised anew where it was cut, so this may take another round.
        keep -= len(ids) - room
    raise UserError(f"a prompt of at most {room} tokens has no room for it")


def _ends(model: Model, tokens: Sequence[int], keep: int, keep_end: bool) -> str:
    """Text of the first `keep` tokens, or of as many in halves from both ends."""
    if not keep_end:
        return model.tokenizer.decode(tokens[:keep])
    end = keep // 2
    parts = (tokens[: keep - end], tokens[len(tokens) - end :])
    return " ".join(model.tokenizer.decode(part) for part in parts if part)
