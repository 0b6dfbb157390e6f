"""What a measurement decodes: a file of prompts or a published question file, all turns, cut to fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from medusa_jax.commands.flags import at_least, flag
from medusa_jax.errors import UserError
from medusa_jax.evaluate.questions import DEMO_PROMPTS, prompt_of, spread
from medusa_jax.text.chat import PLAIN, encode_prompt
from medusa_jax.whole_files import Json
from research.question_files import framed, read_questions

if TYPE_CHECKING:
    from medusa_jax.api import Model

# The prompt length limit of Amphista (A.2.1).
PAPER_ROOM = 2048


@dataclass(frozen=True, kw_only=True)
class TemplateFlags:
    """How a question becomes a prompt."""

    chat_template: str = flag(
        "for --questions: a shipped template, plain (none), or auto: the tokenizer's own if it has "
        "one, else plain",
        "auto",
    )
    max_prompt_tokens: int = flag(
        "for --questions: longer prompts are cut (default: 2048, or what the context leaves next to "
        "the answer)",
        0,
    )


@dataclass(frozen=True, kw_only=True)
class PromptFlags(TemplateFlags):
    """Which prompts are decoded."""

    prompts: str = flag(
        "JSONL: prompt/prompt_ids, or Spec-Bench questions with turns (first turn); an optional "
        "'continuation_ids' is the real text (default: the demo's)",
        str(DEMO_PROMPTS),
    )
    questions: str | None = flag(
        "instead: a question file as published (Spec-Bench, MT-bench, AlpacaEval, HumanEval, GSM8K, "
        "XSUM, CNN/DM), through the chat template",
        None,
        metavar="FILE",
    )
    limit: int = flag("most prompts to use; 0 is all", 50, type=at_least(0))


def questions_of(given: PromptFlags, model: str | None = None) -> list[Json]:
    """--limit of --questions, from all categories alike; else the first of --prompts.

    Args:
      model: the ids of the demo's prompts are of its vocabulary: another model gets their texts.
    """
    if given.questions:
        return spread(read_questions(given.questions), given.limit)
    questions = read_questions(given.prompts, given.limit)
    if model and given.prompts == str(DEMO_PROMPTS):
        return [
            {name: value for name, value in question.items() if not name.endswith("_ids")}
            for question in questions
        ]
    return questions


def first_prompts(
    given: PromptFlags, model: "Model", questions: Sequence[Json], new_tokens: int
) -> list[list[int]]:
    """Ids of the first prompts: --questions through the chat template, --prompts unchanged."""
    if not given.questions:
        return [model.encode(prompt_of(question)) for question in questions]
    template = find_template(model, given.chat_template)
    room = prompt_room(given, model.config.max_position, new_tokens)
    return [turn_prompt(model, q, [], template, room)[0] for q in questions]


def prompt_room(given: TemplateFlags, context: int, new_tokens: int) -> int:
    """Most tokens of a prompt: as asked for, or the papers' 2048 where the answer still fits.

    Raises:
      UserError: the answer takes the whole context.
    """
    if given.max_prompt_tokens < 0:
        raise UserError("--max_prompt_tokens is 1 or more")
    left = context - new_tokens
    if left < 1:
        raise UserError(
            f"--max_new_tokens {new_tokens} leaves no room for a prompt in a context of {context}"
        )
    return min(given.max_prompt_tokens or PAPER_ROOM, left)


def find_template(model: "Model", asked: str) -> str:
    """Resolve "auto": the tokenizer's template ("") if it has one, else "plain"."""
    if asked != "auto":
        return asked
    return "" if model.tokenizer.chat_template else PLAIN


def turn_prompt(
    model: "Model", question: Json, answers: Sequence[str], template: str, room: int
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
    model: "Model",
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


def _ends(model: "Model", tokens: Sequence[int], keep: int, keep_end: bool) -> str:
    """Text of the first `keep` tokens, or of half as many from each end."""
    if not keep_end:
        return model.tokenizer.decode(tokens[:keep])
    end = keep // 2
    parts = (tokens[: keep - end], tokens[len(tokens) - end :])
    return " ".join(model.tokenizer.decode(part) for part in parts if part)
