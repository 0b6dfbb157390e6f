"""Samples of training data: where they are read from, and the turns that a record holds.

Each sample is read when it is used, so that a bad one fails alone.
"""

import collections
import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError, first_line
from medusa_jax.interop import chat
from medusa_jax.whole_files import Json, decode_text, read_text

# Suffixes of the files of a directory that are read as text, and of single files.
TEXT_FILES = (".txt", ".md", ".py")
DATA_FILES = (".jsonl", ".json", ".parquet", ".txt")
# A sample's hidden states, written by speculators (`given_states.py`).
STATES = re.compile(r"hs_(\d+)\.safetensors")
# Fields that hold a list of turns.
TURNS = ("conversations", "messages", "conversation")
# Fields of one question, of its subject, and of its answer: Alpaca, Dolly, prompt and completion.
QUESTIONS = ("instruction", "prompt", "question", "query")
ABOUT = ("input", "context")
ANSWERS = ("output", "completion", "response", "answer")
SYSTEMS = ("system", "system_prompt")
# Roles in training data, compared in lower case, and the fields of a turn.
DATA_ROLES = chat.MESSAGE_ROLES | dict.fromkeys(("human", "prompter"), "user")
DATA_ROLES |= dict.fromkeys(
    ("gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", "chatbot"), "assistant"
)
ROLES_IN, TEXTS_IN = ("role", "from"), ("content", "value", "text")
THOUGHTS_IN = ("reasoning_content", "reasoning", "thinking")


class Line(NamedTuple):
    """A line of a file of JSON lines: its number from 1, and its bytes."""

    number: int
    data: bytes


def names(source: str) -> list[str]:
    """The names in `data.source`.

    Raises:
      UserError: one of them is empty.
    """
    found = [name.strip() for name in source.split(",")]
    if not all(found):
        raise UserError("data.source is empty: name a file, a directory or a dataset id")
    return found


def read_records(source: str, pack: DataConfig) -> Sequence[object]:
    """The samples of a source, for `parse`; those of a directory are its text or parquet files.

    Raises:
      UserError: not readable, or no samples.
    """
    name = source.lower()
    files = files_in(source)
    if files and files[0].suffix == ".parquet":
        return _dataset(source, pack)
    if os.path.isdir(source):
        records: Sequence[object] = files
    elif not os.path.isfile(source) or name.endswith(".parquet"):
        return _dataset(source, pack)
    elif name.endswith((".jsonl", ".json")):
        records = _json_records(source)
    elif name.endswith(".txt"):
        records = [read_text(source)]
    else:
        raise UserError(f"{source}: data files end in {', '.join(DATA_FILES)}")
    if not records:
        raise UserError(f"{source} has no samples")
    return records[: pack.max_samples or None]


def files_in(directory: str) -> list[Path]:
    """The parquet files below a directory, else its non-empty text files, sorted."""
    files = [path for path in Path(directory).rglob("*") if path.is_file()]
    texts = [path for path in files if path.suffix in TEXT_FILES and path.stat().st_size]
    return sorted([path for path in files if path.suffix == ".parquet"] or texts)


def states_in(source: str, limit: int = 0) -> dict[int, str]:
    """The first `limit` files of hidden states (0: all) by their numbers; {} if a source holds none."""
    for directory in (source, os.path.join(source, "hidden_states")):
        if os.path.isdir(directory):
            matches = [m for m in map(STATES.fullmatch, os.listdir(directory)) if m]
            found = sorted((int(m[1]), os.path.join(directory, m[0])) for m in matches)
            if found:
                return dict(found[: limit or None])
    return {}


def _json_records(source: str) -> Sequence[object]:
    """The records of a JSON list, or the lines of JSON lines, under either suffix."""
    try:
        data = Path(source).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}") from error
    lines = [Line(n, line) for n, line in enumerate(data.splitlines(), 1) if line.strip()]
    try:
        whole = json.loads(decode_text(data))
    except (ValueError, RecursionError) as error:
        first = data.lstrip(b"\xef\xbb\xbf\r\n\t ")[:1]
        if first == b"[" and source.lower().endswith(".json"):
            raise UserError(f"{source} cannot be read: {error}") from error
        return lines
    if isinstance(whole, list):
        return whole
    return lines if len(lines) == 1 else [whole]


def _dataset(source: str, pack: DataConfig) -> Sequence[object]:
    """A parquet file, a directory of them, or a Hugging Face dataset by id."""
    here = os.path.exists(source)
    is_path = source.startswith((".", "/")) or source.lower().endswith(DATA_FILES)
    if not here and (is_path or source.count("/") > 1):
        raise UserError(f"no file or token directory {source}")
    import datasets

    try:
        if os.path.isfile(source):
            records = datasets.Dataset.from_parquet(glob.escape(source))
        else:
            records = datasets.load_dataset(source, split=pack.split)
    except Exception as error:  # the library raises many types for missing, gated, offline
        if here:
            raise UserError(f"{source} cannot be read: {first_line(error)}") from error
        raise UserError(
            f"{source} is neither a file nor a dataset that can be loaded ({first_line(error)}); give a "
            f"path, check the id and split {pack.split!r}, or log in with `hf auth login`"
        ) from error
    return records.select(range(min(pack.max_samples or len(records), len(records))))


def parse(record: object) -> object:
    """The content of a record.

    Raises:
      UserError: the reason why it cannot be read.
    """
    try:
        if isinstance(record, Line):
            return json.loads(decode_text(record.data))
        return decode_text(record.read_bytes()) if isinstance(record, Path) else record
    except UnicodeDecodeError as error:
        raise UserError("not UTF-8") from error
    except OSError as error:
        raise UserError(f"not readable ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError("broken JSON") from error


def reasons(problems: dict[int, str], records: Sequence[object]) -> str:
    """ "2 x broken JSON, first in line 3" of the problems by number of sample, ascending."""
    first = {why: i for i, why in reversed(list(problems.items()))}

    def place(i: int) -> str:
        record = records[i]
        if isinstance(record, Line):
            return f"line {record.number}"
        return str(record) if isinstance(record, Path) else f"sample {i + 1}"

    return "; ".join(
        f"{n} x {why}, first in {place(first[why])}"
        for why, n in collections.Counter(problems.values()).most_common()
    )


def turns_of(record: object, answered: bool = True) -> tuple[str, list[object]]:
    """The form of a conversation and its turns, not parsed; ("", []) of a record that holds none.

    Example: {"instruction": "Add.", "input": "1, 2", "output": "3"} ->
    ("instruction, input, output", [{"role": "user", "content": "Add.\\n\\n1, 2"}, {"role": "assistant", ...}]).

    Args:
      answered: whether a question needs an answer.
    """
    record = {"messages": record} if isinstance(record, list) else record
    fields: dict[str, object] = record if isinstance(record, dict) else {}
    if name := field_of(fields, TURNS):
        found = fields[name]
        if isinstance(found, dict) and all(isinstance(x, list) for x in found.values()):
            # A list of structs, as `datasets` keeps some: a list of each field.
            found = [dict(zip(found, row)) for row in zip(*found.values())]
        turns = list(found) if isinstance(found, list) else []
        first = next((turn for turn in turns if isinstance(turn, dict)), {})
        keys = [field_of(first, known) for known in (ROLES_IN, TEXTS_IN)]
        form = f"{name} ({', '.join(filter(None, keys))})"
    else:
        keys = [field_of(fields, known) for known in (QUESTIONS, ABOUT, ANSWERS)]
        question, about, answer = (fields.get(key) for key in keys)
        if not keys[0] or (answered and not keys[2]):
            return "", []
        if about and isinstance(question, str):
            question = f"{question}\n\n{about}"
        turns = _as_turns("user", question) + _as_turns("assistant", answer)
        form = ", ".join(filter(None, keys))
    system = fields.get(field_of(fields, SYSTEMS))
    opening = parse_turn(turns[0])[0] if turns else {}
    if isinstance(system, str) and system.strip() and opening.get("role") != "system":
        turns = _as_turns("system", system) + turns
    return form, turns


def _as_turns(role: str, said: object) -> list[object]:
    """A list of turns as it is, a text as the one turn of `role`, none of None."""
    if isinstance(said, list):
        return said
    return [] if said is None else [{"role": role, "content": said}]


def parse_turns(turns: Sequence[object]) -> tuple[list[chat.Message], str]:
    """Parse turns of training data, `[{"from": "human", "value": ...}, ...]` -> (messages, "") or ([], reason).

    Assistant turns before the first user turn (ShareGPT has many such conversations) and user turns after the last
    answer are dropped.
    """
    messages: list[chat.Message] = []
    for turn in turns:
        message, problem = parse_turn(turn)
        if problem:
            return [], problem
        messages.append(message)
    system = messages[:1] if messages and messages[0]["role"] == "system" else []
    rest = messages[len(system) :]
    while rest and rest[0]["role"] == "assistant":
        rest = rest[1:]
    while rest and rest[-1]["role"] == "user":
        rest = rest[:-1]
    if not rest:
        return [], "no answered user turn"
    for i, message in enumerate(rest):
        if message["role"] != ("user", "assistant")[i % 2]:
            return [], "roles do not alternate"
        if not message["content"].strip():
            return [], f"an empty {message['role']} turn"
    return system + rest, ""


def parse_turn(turn: object) -> tuple[chat.Message, str]:
    """(message, "") of a turn of training data, or ({}, reason)."""
    fields: Json = turn if isinstance(turn, dict) else {}
    role_field = field_of(fields, ROLES_IN) or ROLES_IN[0]
    text_field = field_of(fields, TEXTS_IN) or TEXTS_IN[0]
    if isinstance(role := fields.get(role_field), str):
        fields = fields | {role_field: role.strip().lower()}
    message, problem = chat.read_turn(fields, role_field, text_field, DATA_ROLES)
    thoughts = [x for x in THOUGHTS_IN if message and isinstance(fields.get(x), str)]
    return message | {name: fields[name] for name in thoughts}, problem


def field_of(record: Json, known: Sequence[str]) -> str:
    """The first of these fields that a record has, "" if none; data sets fill others with None."""
    return next((name for name in known if record.get(name) is not None), "")
