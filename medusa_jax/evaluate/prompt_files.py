"""Read prompts from files: prompts, questions, conversations or training data."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_jax.config import DataConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.training.data import conversations
from medusa_jax.training.data.asked import asked, read_usable
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.api import Model, Options

DEMO_PROMPTS = Path(__file__).parents[1] / "demo" / "prompts.jsonl"
# Characters of a text that ask a model to continue it.
BEGINNING = 200


def read_prompts(path: str, limit: int = 0) -> list[Json]:
    """The first `limit` records (0 is all) of prompts or training data that ask something; says what is skipped.

    Raises:
      UserError: not readable, or nothing usable.
    """
    return read_usable(path, DataConfig(), with_prompt, limit)


def with_prompt(_: int, record: object) -> Json:
    """The fields of a record that asks something, with `messages` if it is a conversation, or a `prompt` or `prompt_ids`.

    A `prompt` with an answer is a conversation; the beginning of a `text` is a prompt.

    Raises:
      UserError: the reason why it cannot be asked.
    """
    given = {"text": record} if isinstance(record, str) else conversations.fields_of(record)
    fields = {name: value for name, value in given.items() if value is not None}
    text = fields.get("text")
    asks = (*conversations.TURNS, "turns", "prompt_ids", *conversations.QUESTIONS)
    if text and isinstance(text, str) and not conversations.field_of(fields, asks):
        fields["prompt"] = text[:BEGINNING]
    found = asked(fields)
    if not found.talk.form or (found.prompt and not conversations.turns_of(fields).form):
        return fields  # no conversation, or a prompt without an answer
    if found.talk.form == "turns":
        fields["prompt"] = found.turns[0]
    messages, problem = conversations.parse_turns(found.talk.turns, answered=False)
    if problem:
        raise UserError(problem)
    return fields | {"messages": messages}


def record_prompt(model: "Model", record: Json, template: str = "") -> str | list[int]:
    """Return the prompt of a record; of a conversation, everything up to its last user turn. Without a template, a
    `prompt` is continued.

    Raises:
      UserError: the template refuses the conversation.
    """
    from medusa_jax.text.chat import encode_prompt  # here, not for --help

    has_template = template or model.tokenizer.chat_template
    if "messages" not in record:
        ids: list[int] = record.get("prompt_ids") or []
        return ids or record["prompt"]
    if not has_template and "prompt" in record:
        return record["prompt"]
    messages = record["messages"]
    end = -1 if messages[-1]["role"] == "assistant" else None
    return encode_prompt(model.tokenizer, messages[:end], template)


def record_prompts(
    model: "Model", records: Sequence[Json], options: "Options", template: str = ""
) -> "tuple[list[Json], list[str | list[int]], Options]":
    """The records whose conversations the template takes, their prompts, and options whose texts end where it ends a turn.

    Raises:
      UserError: it takes none.
    """
    if any("messages" in record for record in records):
        options = model.ending_turns(options, template)
    taken, prompts, refused = [], [], []
    for record in records:
        try:
            prompts.append(record_prompt(model, record, template))
            taken.append(record)
        except UserError as error:
            refused.append(error)
    if not taken:
        raise refused[0]
    if refused:
        inform(f"{len(refused)} of {len(records)} prompts are left out: {refused[0]}")
    return taken, prompts, options


def spread(questions: Sequence[Json], limit: int) -> list[Json]:
    """Select `limit` questions (0 is all) evenly from all categories, in the order of the file.

    Files are sorted by category: the first 50 questions of Spec-Bench are all MT-bench's.
    """
    by_category: dict[str, list[int]] = defaultdict(list)
    for i, question in enumerate(questions):
        by_category[str(question.get("category", ""))].append(i)
    order = sorted(
        (place, i) for numbers in by_category.values() for place, i in enumerate(numbers)
    )
    return [questions[i] for i in sorted(i for _, i in order[: limit or None])]
