"""Read question files: published ones, and other records of conversations or prompts, which are asked turn by turn."""

from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError
from medusa_jax.training.data.asked import asked, usable
from medusa_jax.training.data.conversations import fields_of
from medusa_jax.whole_files import Json

# Published data sets without categories, and the fields of their records.
DATA_SETS = {
    "humaneval": {"task_id", "prompt", "entry_point"},
    "gsm8k": {"question", "answer"},
    "cnn_dm": {"article", "highlights"},
    "xsum": {"document", "summary"},
    "alpaca_eval": {"instruction"},
}
# The text of a record that is asked in a frame, zero-shot and without a chat template.
ARTICLES = {"cnn_dm": "article", "xsum": "document"}
# Amphista A.2.1: "'Article: '+'Original Text'+'Summary: '".
ARTICLE = ("Article: ", "Summary: ")


def read_questions(path: str) -> list[Json]:
    """Read the questions of a file, each as `question_of` returns it.

    Raises:
      UserError: not readable, or a record asks nothing.
    """
    found, n_problems, reasons = usable(path, DataConfig(), question_of)
    if n_problems:
        raise UserError(f"{path}: {reasons}")
    return found


def question_of(number: int, record: object) -> Json:
    """A record with these fields besides its own.

    question_id, category: from the file; else its number and the name of the data set.
    turns: the user's turns; [] if `prompt_ids` are continued.
    system: the text before them, "" for none.
    prompt: the first turn, in its frame.
    frame: texts before and after the turn, for data sets used without a chat template.

    Raises:
      UserError: the reason why it asks nothing.
    """
    fields = {name: value for name, value in fields_of(record).items() if value is not None}
    sets = (name for name, of_set in DATA_SETS.items() if of_set <= fields.keys())
    name = next(sets, "all")
    is_article = name in ARTICLES
    found = asked({"turns": [fields[ARTICLES[name]]]} if is_article else fields)
    frame = ARTICLE if is_article else None
    turns = list(found.turns)
    if found.prompt:
        frame = ("", "") if name == "all" else None
        turns = [found.prompt] if isinstance(found.prompt, str) else []
    category = fields.get("category", fields.get("dataset", fields.get("file", name)))
    question: Json = {"question_id": number} | fields
    question |= {
        "category": str(category),
        "frame": frame,
        "turns": turns,
        "system": found.system,
    }
    return question | ({"prompt": framed(question, turns[0])} if turns else {})


def framed(question: Json, turn: str) -> str:
    """A turn between the texts of its question's frame."""
    head, tail = question["frame"] or ("", "")
    return f"{head}{turn}{tail}"
