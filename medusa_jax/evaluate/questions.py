"""Read files of prompts: one JSON object a line, with `prompt`, `prompt_ids`, `messages` or `turns`."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_jax.config import DataConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.training.data import conversations, sources
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
    records = sources.read_records(path, DataConfig())
    found: list[Json] = []
    problems: dict[int, str] = {}
    for number, record in enumerate(records):
        if 0 < limit == len(found):
            break
        try:
            found.append(with_prompt(sources.parse(record)))
        except UserError as error:
            problems[number] = str(error)
    reasons = sources.reasons(problems, records)
    if not found:
        raise UserError(f"{path} has nothing to ask ({reasons})")
    if problems:
        inform(f"{path}: {len(problems)} records skipped ({reasons})")
    return found


def with_prompt(record: object) -> Json:
    """The fields of a record that asks something: `turns` (MT-bench, Spec-Bench), `prompt_ids`, `messages` or a `prompt`.

    Conversations, and pairs of prompt and answer, are parsed as in training; they may end with a question.

    Raises:
      UserError: the reason why it cannot be asked.
    """
    given = {"text": record} if isinstance(record, str) else conversations.fields_of(record)
    fields = {name: value for name, value in given.items() if value is not None}
    is_talk = conversations.field_of(fields, conversations.TURNS)
    if not is_talk and fields.keys() & {"turns", "prompt_ids"}:
        check({"turns": []} | fields, "a record")
        return fields
    is_text = isinstance(fields.get("prompt"), str)
    found = conversations.turns_of(fields, answered=is_text)
    if found.form:
        talk, problem = conversations.parse_turns(found.turns, answered=False)
        if problem:
            raise UserError(problem)
        return fields | {"messages": talk}
    if is_text:
        return fields
    if isinstance(text := fields.get("text"), str):
        return fields | {"prompt": text[:BEGINNING]}
    raise UserError("nothing to ask")


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


def record_prompt(model: "Model", record: Json, template: str = "") -> str | list[int]:
    """Return the prompt of a record; of a conversation, everything up to its last user turn; of a
    question with `turns`, the first. Without a template, text is continued.

    Raises:
      UserError: the template refuses the conversation.
    """
    from medusa_jax.text.chat import encode_prompt  # here, not for --help

    has_template = template or model.tokenizer.chat_template
    if "messages" in record and (has_template or "prompt" not in record):
        messages = record["messages"]
    elif "turns" in record and has_template:
        messages = [{"role": "user", "content": record["turns"][0]}]
    elif "turns" in record:
        return str(record["turns"][0])
    else:
        ids: list[int] = record.get("prompt_ids") or []
        return ids if ids or "prompt" not in record else record["prompt"]
    end = -1 if messages[-1]["role"] == "assistant" else None
    return encode_prompt(model.tokenizer, messages[:end], template)


def record_prompts(
    model: "Model", records: Sequence[Json], options: "Options", template: str = ""
) -> "tuple[list[Json], list[str | list[int]], Options]":
    """The records whose conversations the template takes, their prompts, and options whose texts end where it ends a turn.

    Raises:
      UserError: it takes none.
    """
    from medusa_jax.api.prompts import ending_turns

    if any({"messages", "turns"} & record.keys() for record in records):
        options = ending_turns(model.tokenizer, model.eos_ids, options, template)
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
