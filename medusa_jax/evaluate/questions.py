"""Read files of prompts: one JSON object a line, with `prompt`, `prompt_ids`, `messages` or `turns`."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError
from medusa_jax.training.data import conversations, sources
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.api import Model, Options

DEMO_PROMPTS = Path(__file__).parents[1] / "demo" / "prompts.jsonl"
# Characters of a text that ask a model to continue it.
BEGINNING = 200


def read_prompts(path: str, limit: int = 0, messages: bool = False) -> list[Json]:
    """Read the first `limit` records (0 is all) of a JSONL file, each with `prompt` or `prompt_ids`.

    Args:
      messages: also accept any training data, whose conversations become `messages` and whose texts
        a `prompt`, their beginning; and questions with `turns`, as MT-bench and Spec-Bench publish them.

    Raises:
      UserError: not readable, or a record without a prompt.
    """
    records = read_records(path)[: limit or None]
    records = [with_prompt(record) for record in records] if messages else records
    if messages and all("messages" in r for r in records):
        for number, record in enumerate(records):
            turns = record["messages"]
            if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
                raise UserError(f"{path}: record {number} has no list of turns as messages")
        if talks := [r for r in records if r["messages"]]:
            return talks
        raise UserError(f"{path} holds no conversation with a turn")
    fields = ("prompt", "prompt_ids", *(("turns",) if messages else ()))
    if not all(any(name in r for name in fields) for r in records):
        raise UserError(f"every line of {path} needs 'prompt' or 'prompt_ids'")
    for number, record in enumerate(records):
        turns = [record["prompt"]] if "prompt" in record else record.get("turns", [])
        check(record | {"turns": turns}, f"{path}: record {number}")
    return records


def with_prompt(record: Json) -> Json:
    """A record of training data with `messages` or a `prompt` added, unless it has a prompt or `turns`."""
    if record.keys() & {"messages", "turns", "prompt", "prompt_ids"}:
        return record
    if isinstance(text := record.get("text"), str):
        return record | {"prompt": text[:BEGINNING]}
    turns = conversations.turns_of(record, answered=False).turns
    messages = [message for turn in turns if (message := conversations.parse_turn(turn)[0])]
    return record | {"messages": messages} if messages else record


def check(question: Json, where: str) -> None:
    """Check that the turns of a question are texts, and its `prompt_ids`, if any, token ids.

    Raises:
      UserError: they are not, or it has neither.
    """
    ids, turns = question.get("prompt_ids"), question["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise UserError(f"{where} should ask text, not {turns!r}")
    if not ids and not turns:
        raise UserError(f"{where} asks nothing")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise UserError(f"{where}: 'prompt_ids' should be a list of token ids, not {ids!r}")


def prompt_of(question: Json) -> str | list[int]:
    """A question's prompt, as ids if the record has them."""
    ids: list[int] = question.get("prompt_ids") or []
    return ids if ids or "prompt" not in question else question["prompt"]


def record_prompt(model: "Model", record: Json, template: str = "") -> str | list[int]:
    """Return the prompt of a record; of a conversation, everything up to its last user turn; of a
    question with `turns`, the first.

    Raises:
      UserError: the template refuses the conversation, or it has no user turn.
    """
    from medusa_jax.text.chat import encode_prompt  # here, not for --help

    if "messages" in record:
        messages = record["messages"]
    elif "turns" in record and (template or model.tokenizer.chat_template):
        messages = [{"role": "user", "content": record["turns"][0]}]
    elif "turns" in record:
        return str(record["turns"][0])
    else:
        return prompt_of(record)
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        raise UserError("a conversation without a user turn cannot be answered")
    return encode_prompt(model.tokenizer, messages[: users[-1] + 1], template)


def record_prompts(
    model: "Model", records: Sequence[Json], options: "Options", template: str = ""
) -> "tuple[list[str | list[int]], Options]":
    """The prompts of records, and options whose texts end where the chat template ends a turn."""
    from medusa_jax.api.prompts import ending_turns

    if {"messages", "turns"} & records[0].keys():
        options = ending_turns(model.tokenizer, model.eos_ids, options, template)
    return [record_prompt(model, record, template) for record in records], options


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


def read_records(path: str) -> list[Json]:
    """The records of a file, a directory or a dataset, as in training; a file of text is {"text": ...}.

    Raises:
      UserError: not readable, no records, or records that are not objects.
    """
    records = []
    for number, record in enumerate(sources.read_records(path, DataConfig())):
        try:
            value = sources.parse(record)
        except UserError as error:
            raise UserError(f"{path}: record {number}: {error}") from error
        text = isinstance(value, str)
        value = {"text": value} if text else conversations.fields_of(value) or value
        if not isinstance(value, dict):
            raise UserError(f"{path}: every record has to be a JSON object")
        records.append(value)
    return records
