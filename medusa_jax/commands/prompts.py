"""Which prompts a measuring command decodes: a file of prompts, or a published question file."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from medusa_jax.commands.flags import add_limit
from medusa_jax.errors import UserError
from medusa_jax.evaluate.questions import (
    DEMO_PROMPTS,
    prompt_of,
    read_questions,
    spread,
)


@dataclass(frozen=True, kw_only=True)
class TemplateFlags:
    """How a model is flags a question file."""

    chat_template: str
    max_prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class PromptFlags(TemplateFlags):
    """--prompts or --questions, and --limit."""

    prompts: str
    questions: str | None
    limit: int


def add_prompt_files(p: argparse.ArgumentParser, limit: int) -> None:
    """The flags of `PromptFlags`."""
    p.add_argument("--prompts", default=str(DEMO_PROMPTS),
                   help="JSONL: prompt/prompt_ids, or Spec-Bench questions with turns (first "
                   "turn); an optional 'continuation_ids' is the real text")  # fmt: skip
    p.add_argument("--questions", metavar="FILE",
                   help="instead: a question file as published (Spec-Bench, MT-bench, AlpacaEval, "
                   "HumanEval, GSM8K, XSUM, CNN/DM), through the chat template")  # fmt: skip
    add_limit(p, limit)
    add_template(p)


def add_template(p: argparse.ArgumentParser) -> None:
    """The flags of `TemplateFlags`."""
    p.add_argument("--chat_template", default="auto",
                   help="for --questions: a shipped template, plain (none), or auto: the "
                   "tokenizer's own if it has one, else plain (default)")  # fmt: skip
    p.add_argument("--max_prompt_tokens", type=int, default=0,
                   help="for --questions: longer prompts are cut (default: 2048, or what the "
                   "context leaves next to the answer)")  # fmt: skip


def questions_of(flags: PromptFlags, model: str | None = None) -> list[dict[str, Any]]:
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
    flags: PromptFlags, model: Any, questions: Sequence[dict[str, Any]], new_tokens: int
) -> list[list[int]]:
    """Ids of what is asked first: --questions through the chat template, --prompts unchanged."""
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
