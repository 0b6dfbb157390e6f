"""Records that ask a model something: a text to continue, or the turns of a user."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from medusa_jax import hosts
from medusa_jax.config import DataConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.training.data import conversations, sources

T = TypeVar("T")


class Asked(NamedTuple):
    """What a record asks the model.

    Attributes:
      prompt: text or token ids to continue, "" for none.
      system: system text, "" for none.
      turns: the user turns that hold text, in order.
      talk: the conversation that they are from.
    """

    prompt: str | list[int]
    system: str
    turns: tuple[str, ...]
    talk: conversations.Conversation


def asked(record: object, vocab_size: int = 2**31) -> Asked:
    """Read what a record of any common format asks.

    The first of these counts: a list of turns, `turns` (MT-bench), `prompt_ids`, another question as in training
    (`conversations.py`). Only a `prompt` is a text to continue.

    Raises:
      UserError: the reason why it asks nothing.
    """
    fields = conversations.fields_of(record)
    name = conversations.field_of(
        fields, (*conversations.TURNS, "turns", "prompt_ids", "prompt")
    )
    value, talk = fields.get(name), conversations.Conversation()
    prompt: str | list[int] = ""
    items: list[Any] = value if isinstance(value, list) else [None]  # which is refused
    if name == "prompt_ids":
        if not all(type(item) is int and 0 <= item < vocab_size for item in items):
            raise UserError(f"prompt_ids that are not token ids below {vocab_size}")
        prompt = items
    elif name == "turns":
        if not all(isinstance(item, str) for item in items):
            raise UserError(f"turns that are not texts: {value!r}")
        turns = [{"role": "user", "content": item} for item in items if item.strip()]
        talk = conversations.turns_of(fields | {"messages": turns})._replace(form=name)
    else:
        talk = conversations.turns_of(fields, answered=False)
        prompt = value if name == "prompt" and isinstance(value, str) else ""
    parsed = [conversations.parse_turn(turn) for turn in talk.turns]
    problems = [problem for _, problem in parsed if problem]
    texts: dict[str, list[str]] = {"system": [], "user": [], "assistant": []}
    for message, _ in parsed:
        if message and message["content"].strip():
            texts[message["role"]].append(message["content"])
    if not (prompt or texts["user"]):
        problems.append("no user turn" if name in conversations.TURNS else "nothing to ask")
        raise UserError(problems[0])
    try:
        "".join((str(prompt), *texts["system"], *texts["user"])).encode()
    except UnicodeEncodeError as error:
        raise UserError("an unpaired surrogate, no valid character") from error
    return Asked(prompt, (texts["system"] or [""])[0], tuple(texts["user"]), talk)


def usable(
    source: str, pack: DataConfig, read: Callable[[int, object], T], limit: int = 0
) -> tuple[list[T], int, str]:
    """Read the first `limit` records (0 is all) that ask something.

    Args:
      read: of a record's number and content; raises UserError for one that asks nothing.

    Returns: what `read` returns, and how many records ask nothing, with the reasons.

    Raises:
      UserError: not readable, or nothing usable.
    """
    records = sources.read_records(source, pack)
    found: list[T] = []
    problems: dict[int, str] = {}
    for number, record in enumerate(records):
        if 0 < limit == len(found):
            break
        try:
            found.append(read(number, sources.parse(record)))
        except UserError as error:
            problems[number] = str(error)
    reasons = sources.reasons(problems, records)
    if not found:
        raise UserError(
            f"{source} has nothing to ask ({reasons}): records need messages, conversations, turns, "
            "prompt_ids, prompt or a question"
        )
    return found, len(problems), reasons


def read_usable(
    source: str, pack: DataConfig, read: Callable[[int, object], T], limit: int = 0
) -> list[T]:
    """Like `usable`, and says what is skipped."""
    found, n, reasons = usable(source, pack, read, limit)
    if n and hosts.first():
        inform(f"{source}: {n} of {n + len(found)} records skipped ({reasons})")
    return found
