"""Scores of answers: ROUGE against references, exact match of GSM8K's last number."""

import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
EXACT_MATCH, ROUGE = "exact_match", "rouge"
ROUGES = ("rouge1", "rouge2", "rougeL")


def final_number(text: str) -> float | None:
    """The number after GSM8K's "####", or else the last one of the text.

    Example: "He pays $1,000. #### 1000" -> 1000.0; "so 3 of 10.5." -> 10.5.
    """
    _, marked, after = text.rpartition("####")
    found = NUMBER.findall(after if marked else text)
    number = found[0] if marked and found else found[-1] if found else None
    return None if number is None else float(number.replace(",", ""))


def kind_of(question: dict[str, Any]) -> str:
    """Return which score a question gets.

    "exact_match" if a reference has GSM8K's mark, "rouge" for other references, "" without
    references or for several turns (those are for judges).
    """
    if len(question["turns"]) != 1 or not any(question["references"]):
        return ""
    [right] = question["references"]
    return EXACT_MATCH if any("####" in one for one in right) else ROUGE


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1.0 if the answer's number equals that of a reference, else 0.0."""
    number = final_number(answer)
    right = {final_number(one) for one in references}
    return float(number is not None and number in right)


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGES), use_stemmer=True)


def has_rouge() -> bool:
    """Whether the optional package `rouge-score` is installed."""
    return find_spec("rouge_score") is not None


def score(kind: str, answer: str, references: Sequence[str]) -> dict[str, float]:
    """Exact match, or F-measures of ROUGE-1, 2 and L in percent, each for its best reference."""
    if kind == EXACT_MATCH:
        return {kind: exact_match(answer, references)}
    found = _scorer().score_multi(list(references), answer)
    return {name: 100 * float(found[name].fmeasure) for name in ROUGES}
