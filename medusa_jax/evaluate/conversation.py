"""From a question to prompt ids: chat templates, earlier answers, truncation."""

from collections.abc import Callable, Sequence

from medusa_jax.api import Model, Options, asking
from medusa_jax.errors import UserError
from medusa_jax.evaluate.questions import framed, prompt_of
from medusa_jax.interop.chat import PLAIN, encode_prompt
from medusa_jax.whole_files import Json

# The prompt length limit of Amphista (A.2.1).
PAPER_ROOM = 2048


def find_template(model: Model, asked: str) -> str:
    """Resolve "auto": the tokenizer's template ("") if it has one, else "plain"."""
    if asked != "auto":
        return asked
    return "" if model.tokenizer.chat_template else PLAIN


def ending_turns(model: Model, options: Options, template: str) -> Options:
    """Options whose text ends where the chat template ends a turn, unless they say where."""
    return asking.ending_turns(model.tokenizer, model.eos_ids, options, template)


def asked(model: Model, record: Json, template: str = "") -> str | list[int]:
    """Return the prompt of a record; of a conversation, everything up to its last user turn.

    Raises:
      UserError: the template refuses the conversation, or it has no user turn.
    """
    if "messages" not in record:
        return prompt_of(record)
    messages = record["messages"]
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        raise UserError("a conversation without a user turn cannot be answered")
    return encode_prompt(model.tokenizer, messages[: users[-1] + 1], template)


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
    if "prompt_ids" in question:
        return model.encode(question["prompt_ids"]), False
    turns: list[str] = question["turns"][: len(answers) + 1]
    in_frame = question["frame"] is not None
    longest = max(range(len(turns)), key=lambda i: len(turns[i]))

    def ids_with(text: str) -> list[int]:
        user_turns = [*turns[:longest], text, *turns[longest + 1 :]]
        if in_frame:
            return model.encode(framed(question, user_turns[0]))
        lines = [user_turns[0]]
        messages = [{"role": "user", "content": user_turns[0]}]
        for answer, turn in zip(answers, user_turns[1:], strict=True):
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


def cut(
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
