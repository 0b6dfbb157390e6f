"""Which prompts a measuring command decodes: a file of prompts, or a published question file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from medusa_jax.commands.flags import at_least, flag
from medusa_jax.errors import UserError
from medusa_jax.evaluate.questions import DEMO_PROMPTS, prompt_of, read_questions, spread
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.api import Model


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


def questions_of(flags: PromptFlags, model: str | None = None) -> list[Json]:
    """--limit of --questions, from all categories alike; else the first of --prompts.

    Args:
      model: the ids of the demo's prompts are of its vocabulary: another model gets their texts.
    """
    if flags.questions:
        return spread(read_questions(flags.questions), flags.limit)
    questions = read_questions(flags.prompts, flags.limit)
    if model and flags.prompts == str(DEMO_PROMPTS):
        return [
            {name: value for name, value in question.items() if not name.endswith("_ids")}
            for question in questions
        ]
    return questions


def first_prompts(
    flags: PromptFlags, model: "Model", questions: Sequence[Json], new_tokens: int
) -> list[list[int]]:
    """Ids of the first prompts: --questions through the chat template, --prompts unchanged."""
    from medusa_jax.evaluate.conversation import find_template, turn_prompt

    if not flags.questions:
        return [model.encode(prompt_of(question)) for question in questions]
    template = find_template(model, flags.chat_template)
    room = prompt_room(flags, model.config.max_position, new_tokens)
    return [turn_prompt(model, q, [], template, room)[0] for q in questions]


def prompt_room(flags: TemplateFlags, context: int, new_tokens: int) -> int:
    """Most tokens of a prompt: as asked for, or the papers' 2048 where the answer still fits.

    Raises:
      UserError: the answer takes the whole context.
    """
    from medusa_jax.evaluate.conversation import PAPER_ROOM

    if flags.max_prompt_tokens < 0:
        raise UserError("--max_prompt_tokens is 1 or more")
    left = context - new_tokens
    if left < 1:
        raise UserError(
            f"--max_new_tokens {new_tokens} leaves no room for a prompt in a context of {context}"
        )
    return min(flags.max_prompt_tokens or PAPER_ROOM, left)
