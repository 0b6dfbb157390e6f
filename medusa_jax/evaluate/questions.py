"""Read published question files, and our own JSONL of prompts, into one form.

Every record keeps its fields and gains those that `read_questions` lists. The fields of the first
record determine the format of a file (`FORMATS`).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError
from medusa_jax.training.data import sources
from medusa_jax.whole_files import Json

DEMO_PROMPTS = Path(__file__).parents[1] / "demo" / "prompts.jsonl"

# Amphista A.2.1: "'Article: '+'Original Text'+'Summary: '", zero-shot and without a chat template.
ARTICLE = ("Article: ", "Summary: ")


def read_prompts(path: str, limit: int = 0, messages: bool = False) -> list[Json]:
    """Read the first `limit` records (0 is all) of a JSONL file, each with `prompt` or `prompt_ids`.

    Args:
      messages: also accept conversations as `distill` writes them.

    Raises:
      UserError: not readable, or a record without a prompt.
    """
    records = read_records(path)[: limit or None]
    if messages and all("messages" in r for r in records):
        for number, record in enumerate(records):
            turns = record["messages"]
            if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
                raise UserError(f"{path}: record {number} has no list of turns as messages")
        if talks := [r for r in records if r["messages"]]:
            return talks
        raise UserError(f"{path} holds no conversation with a turn")
    if not _are_prompts(records):
        raise UserError(f"every line of {path} needs 'prompt' or 'prompt_ids'")
    for number, record in enumerate(records):
        turns = [record["prompt"]] if "prompt" in record else []
        _check(record | {"turns": turns}, f"{path}: record {number}")
    return records


def _are_prompts(records: Sequence[Json]) -> bool:
    return all("prompt" in r or "prompt_ids" in r for r in records)


def _check(question: Json, where: str) -> None:
    """Refuse a question whose turns are no texts and whose `prompt_ids` are no token ids.

    Raises:
      UserError: such a question, or one without both.
    """
    ids, turns = question.get("prompt_ids"), question["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise UserError(f"{where} should ask text, not {turns!r}")
    if ids is None and not turns:
        raise UserError(f"{where} asks nothing")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise UserError(f"{where}: 'prompt_ids' should be a list of token ids, not {ids!r}")


def read_questions(path: str, limit: int = 0) -> list[Json]:
    """Read the first `limit` questions of a file (0 is all), each with these fields.

    question_id, category: from the file; else its number and the name of the data set.
    turns: the user's turns; [] if a record has only `prompt_ids`.
    prompt: the first turn, in its frame.
    frame: texts before and after the turn, for data sets used without a chat template.

    Raises:
      UserError: not readable, or in an unknown format.
    """
    records = read_records(path)[: limit or None]
    forms = (form for form in FORMATS if all(name in records[0] for name in form.fields))
    form = next(forms, OWN if _are_prompts(records) else None)
    if form is None:
        known = "; ".join(f"{form.name}: {', '.join(form.fields)}" for form in FORMATS)
        raise UserError(
            f"{path} is in no known form; by fields of a record: {known}; prompts: 'prompt' or "
            "'prompt_ids' in every line"
        )
    questions = []
    for number, record in enumerate(records):
        if missing := [name for name in form.fields if name not in record]:
            raise UserError(f"{path}: record {number} lacks {', '.join(missing)}")
        where = f"{path}: record {number}"
        found: Json = {"question_id": number, "category": form.name, "frame": None}
        try:
            found |= record | form.adapt(record)
        except TypeError as error:
            raise UserError(
                f"{where} has other values in {', '.join(form.fields)}: {error}"
            ) from error
        _check(found, where)
        found["category"] = str(found["category"])
        if found["turns"]:
            found["prompt"] = framed(found, found["turns"][0])
        questions.append(found)
    return questions


def prompt_of(question: Json) -> str | list[int]:
    """A question's prompt, as ids if the record has them."""
    ids: list[int] = question.get("prompt_ids") or []
    return ids if ids or "prompt" not in question else question["prompt"]


def framed(question: Json, turn: str) -> str:
    """A turn between the texts of its question's frame."""
    before, after = question["frame"] or ("", "")
    return f"{before}{turn}{after}"


def spread(questions: Sequence[Json], limit: int) -> list[Json]:
    """Select `limit` questions (0 is all) evenly from all categories, in the order of the file.

    Files are sorted by category: the first 50 questions of Spec-Bench are all MT-bench's.
    """
    by_category: dict[str, list[int]] = defaultdict(list)
    for i, question in enumerate(questions):
        by_category[question["category"]].append(i)
    order = sorted(
        (place, i) for own in by_category.values() for place, i in enumerate(own)
    )
    return [questions[i] for i in sorted(i for _, i in order[: limit or None])]


def read_records(path: str) -> list[Json]:
    """The records of a .jsonl or .json file, a .parquet file or a dataset, as in training.

    Raises:
      UserError: not readable, no records, or records that are not objects.
    """
    records = []
    for number, record in enumerate(sources.read_records(path, DataConfig())):
        try:
            found = sources.parse(record)
        except UserError as error:
            raise UserError(f"{path}: record {number}: {error}") from error
        if not isinstance(found, dict):
            raise UserError(f"{path}: every record has to be a JSON object")
        records.append(found)
    return records


def _instruction(record: Json) -> Json:
    """AlpacaEval; its `output` is another model's answer for judges to compare with."""
    text = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
    return {"turns": [text], "category": record.get("dataset", "alpaca_eval")}


def _own(record: Json) -> Json:
    """Our own prompts; `file` names the demo source that a prompt is from."""
    turns = [record["prompt"]] if "prompt" in record else []
    category = record.get("category", record.get("file", "all"))
    return {"turns": turns, "category": category, "frame": ("", "")}


@dataclass(frozen=True)
class Format:
    """A published format.

    Attributes:
      fields: field names that identify the format.
      adapt: converts a record to our fields.
    """

    name: str
    fields: tuple[str, ...]
    adapt: Callable[[Json], Json]


FORMATS = (
    Format("all", ("turns",), lambda r: {}),
    Format(
        "humaneval",
        ("task_id", "prompt", "entry_point"),
        lambda r: {"turns": [r["prompt"]]},
    ),
    Format("gsm8k", ("question", "answer"), lambda r: {"turns": [r["question"]]}),
    Format(
        "cnn_dm",
        ("article", "highlights"),
        lambda r: {"turns": [r["article"]], "frame": ARTICLE},
    ),
    Format(
        "xsum",
        ("document", "summary"),
        lambda r: {"turns": [r["document"]], "frame": ARTICLE},
    ),
    Format("alpaca_eval", ("instruction",), _instruction),
)
OWN = Format("prompts", (), _own)
