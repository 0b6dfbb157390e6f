"""Prompts of `research/learn.py`, composed: every gap of a text is filled at random (`learn_words.json`).

Sources are functions of Python's standard library, up to the end of their docstring.
"""

import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path

from research.smollm2.compose import filled

SHIFTS = ("python", "json", "tomatoes")
WORDS = Path(__file__).parent / "learn_words.json"


def functions() -> Iterator[str]:
    for file in sorted(Path(ast.__file__).parent.glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="ignore")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                lines = source.splitlines()[node.lineno - 1 : node.body[0].end_lineno]
                yield "\n".join(line[node.col_offset :] for line in lines)


def questions(shift: str, n: int) -> list[str]:
    """n different questions of a shift, in the order in which they are asked."""
    words = json.loads(WORDS.read_text())
    if shift == "python":
        words["source"] = sorted(set(functions()))
    draw, found = random.Random(shift), dict[str, None]()
    while len(found) < n:
        found[filled(draw.choice(words[shift]), words, draw)] = None
    return list(found)
