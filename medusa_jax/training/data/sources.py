"""Samples of a text: read when used, so that a bad one fails alone."""

import collections
import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError, first_line
from medusa_jax.notation import entries
from medusa_jax.whole_files import decode_text, read_text

# Suffixes of the files of a directory that are read as text, and of single files.
TEXT_FILES = (".txt", ".md", ".py")
DATA_FILES = (".jsonl", ".json", ".parquet", ".txt")


class Line(NamedTuple):
    """A line of a file of JSON lines: its number from 1, and its bytes."""

    number: int
    data: bytes


def places(text: str) -> list[str]:
    """The entries of a list of files, directories and ids; a path that exists is one, whatever commas it has."""
    return [text] if os.path.exists(text) else entries(text)


def names(source: str) -> list[str]:
    """The names in `data.source`.

    Raises:
      UserError: there is none.
    """
    entered = places(source)
    if not entered:
        raise UserError("data.source is empty: name a file, a directory or a dataset id")
    return entered


def read_records(source: str, pack: DataConfig) -> Sequence[object]:
    """The samples of a source, for `parse`; those of a directory are its text or parquet files.

    Raises:
      UserError: not readable, no samples, or a directory with files that have to be named.
    """
    name = source.lower()
    files = files_in(source)
    if files and files[0].suffix == ".parquet":
        return _dataset(source, pack)
    if os.path.isdir(source):
        # Next to code JSON is often no data; next to a README alone it is.
        kind = "*.json*" if all(file.suffix == ".md" for file in files) else "*.jsonl"
        if unread := sorted(map(str, Path(source).rglob(kind))):
            raise UserError(
                f"of directories no JSON is read: name the file, such as {unread[0]}"
            )
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


def check_all_exist(data: DataConfig) -> None:
    """Refuse names of files that do not exist, before a model is read."""
    for name in [*names(data.source), *places(data.eval_source)]:
        check_exists(name)


def check_exists(source: str) -> bool:
    """Whether a source is a file or directory; else it may be a dataset's id.

    Raises:
      UserError: it can be neither.
    """
    exists = os.path.exists(source)
    is_path = source.startswith((".", "/")) or source.lower().endswith(DATA_FILES)
    if not exists and (is_path or source.count("/") > 1):
        raise UserError(f"no file or token directory {source}")
    return exists


def files_in(directory: str) -> list[Path]:
    """The parquet files below a directory, else its non-empty text files, sorted."""
    files = [path for path in Path(directory).rglob("*") if path.is_file()]
    texts = [path for path in files if path.suffix in TEXT_FILES and path.stat().st_size]
    return sorted([path for path in files if path.suffix == ".parquet"] or texts)


def _json_records(source: str) -> Sequence[object]:
    """The records of a JSON list, or the lines of JSON lines, under either suffix; a list of turns is one record."""
    try:
        data = Path(source).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}") from error
    lines = [Line(n, line) for n, line in enumerate(data.splitlines(), 1) if line.strip()]
    try:
        value = json.loads(decode_text(data))
    except (ValueError, RecursionError) as error:
        first = data.lstrip(b"\xef\xbb\xbf\r\n\t ")[:1]
        if first == b"[" and source.lower().endswith(".json"):
            raise UserError(f"{source} cannot be read: {error}") from error
        return lines
    if isinstance(value, list) and not _are_turns(value):
        return value
    return lines if len(lines) == 1 else [value]


def _are_turns(items: list) -> bool:
    """Whether items are the turns of a conversation: the first one has a role (an author's may be of a text)."""
    from medusa_jax.text.chat import DATA_ROLES  # few runs need it

    first = items[0] if items and isinstance(items[0], dict) else {}
    roles = [first.get(name) for name in ("role", "from", "speaker", "sender")]
    return any(str(role).strip().lower() in DATA_ROLES for role in roles)


def _dataset(source: str, pack: DataConfig) -> Sequence[object]:
    """A parquet file, a directory of them, or a Hugging Face dataset by id."""
    exists = check_exists(source)
    import datasets

    try:
        if os.path.isfile(source):
            records = datasets.Dataset.from_parquet(glob.escape(source))
        else:
            records = datasets.load_dataset(source, split=pack.split)
    except Exception as error:  # the library raises many types for missing, gated, offline
        if exists:
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
    first = {reason: i for i, reason in reversed(list(problems.items()))}

    def place(i: int) -> str:
        record = records[i]
        if isinstance(record, Line):
            return f"line {record.number}"
        return str(record) if isinstance(record, Path) else f"sample {i + 1}"

    return "; ".join(
        f"{n} x {reason}, first in {place(first[reason])}"
        for reason, n in collections.Counter(problems.values()).most_common()
    )
