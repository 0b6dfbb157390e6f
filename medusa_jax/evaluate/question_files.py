"""Read published question files, and our own JSONL of prompts, into one form.

Every record keeps its fields and gains those that `read_questions` lists. The fields of the first
record determine the format of a file (`FORMATS`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medusa_jax.errors import UserError
from medusa_jax.evaluate.questions import check, read_records
from medusa_jax.whole_files import Json

# Amphista A.2.1: "'Article: '+'Original Text'+'Summary: '", zero-shot and without a chat template.
ARTICLE = ("Article: ", "Summary: ")


def read_questions(path: str) -> list[Json]:
    """Read the questions of a file, each with these fields.

    question_id, category: from the file; else its number and the name of the data set.
    turns: the user's turns; [] if a record has only `prompt_ids`.
    prompt: the first turn, in its frame.
    frame: texts before and after the turn, for data sets used without a chat template.

    Raises:
      UserError: not readable, or in an unknown format.
    """
    records = read_records(path)
    forms = (form for form in FORMATS if all(name in records[0] for name in form.fields))
    form = next(forms, PROMPTS if _are_prompts(records) else None)
    if form is None:
        formats = "; ".join(f"{form.name}: {', '.join(form.fields)}" for form in FORMATS)
        raise UserError(
            f"{path} is in no known form; by fields of a record: {formats}; prompts: 'prompt' or "
            "'prompt_ids' in every line"
        )
    questions = []
    for number, record in enumerate(records):
        if gaps := [name for name in form.fields if name not in record]:
            raise UserError(f"{path}: record {number} lacks {', '.join(gaps)}")
        where = f"{path}: record {number}"
        question: Json = {"question_id": number, "category": form.name, "frame": None}
        try:
            question |= record | form.adapt(record)
        except TypeError as error:
            raise UserError(
                f"{where} has other values in {', '.join(form.fields)}: {error}"
            ) from error
        check(question, where)
        question["category"] = str(question["category"])
        if question["turns"]:
            question["prompt"] = framed(question, question["turns"][0])
        questions.append(question)
    return questions


def framed(question: Json, turn: str) -> str:
    """A turn between the texts of its question's frame."""
    head, tail = question["frame"] or ("", "")
    return f"{head}{turn}{tail}"


def _are_prompts(records: Sequence[Json]) -> bool:
    return all("prompt" in r or "prompt_ids" in r for r in records)


def _instruction(record: Json) -> Json:
    """AlpacaEval; its `output` is another model's answer for judges to compare with."""
    text = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
    return {"turns": [text], "category": record.get("dataset", "alpaca_eval")}


def _our_prompt(record: Json) -> Json:
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
PROMPTS = Format("prompts", (), _our_prompt)
