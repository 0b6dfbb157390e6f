"""Functions in source files: where each starts, where its body starts, and where it ends.

Python is parsed. The other languages have braces, and a function is a line with a name, parentheses and
an opening brace at its end that stands at the left margin or one step in; good enough to cut prompts from.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

# Lines of a function that fits into a question.
SHORT = range(4, 31)
LONGEST = 120
COMMENT = re.compile(r"[ \t]*(//|/\*|\*)")
# Words before a parenthesis that are no function's name.
KEYWORDS = {
    "if",
    "for",
    "while",
    "switch",
    "catch",
    "return",
    "else",
    "match",
    "function",
    "func",
    "fn",
}
HEAD = {
    "javascript": re.compile(
        r"^(?:export )?(?:default )?(?:async )?function\*? ?(\w+)\([^\n]*\{$"
        r"|^  (?:static |async |private |public )*(\w+)\([^\n]*\)[^\n;]*\{$",
        re.MULTILINE,
    ),
    "go": re.compile(r"^func (?:\([^)\n]*\) )?(\w+)\([^\n]*\{$", re.MULTILINE),
    "rust": re.compile(
        r"^(?: {4})?(?:pub(?:\([^)]*\))? )?(?:const |unsafe |async )*fn (\w+)[^\n]*\{$", re.MULTILINE
    ),
    "c": re.compile(r"^(?!typedef|struct|enum|#)\w[\w \t*]*?\b(\w+) ?\([^;{}]*\)\s*\{$", re.MULTILINE),
}  # fmt: skip


@dataclass(frozen=True)
class Function:
    """Offsets in a text: `start` (comments above included), `body` (after documentation and head), `end`.

    Attributes:
      documented: has a docstring, or a comment above it.
      short: whether its number of lines is in `SHORT`.
    """

    name: str
    start: int
    body: int
    end: int
    documented: bool
    short: bool


def functions(text: str, language: str) -> list[Function]:
    """The functions of a file, in order; [] if it cannot be parsed."""
    if language == "python":
        return list(_python(text))
    return list(_braces(text, HEAD[language])) if language in HEAD else []


def _python(text: str) -> Iterator[Function]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        documented = ast.get_docstring(node) is not None and len(node.body) > 1
        head = node.body[0].end_lineno if documented else node.body[0].lineno - 1
        end = node.end_lineno or node.lineno
        if head is None or node.lineno > head or end - first > LONGEST:
            continue
        yield Function(
            node.name,
            starts[first],
            starts[head],
            starts[end],
            documented,
            end - first in SHORT,
        )


def _braces(text: str, head: re.Pattern[str]) -> Iterator[Function]:
    for match in head.finditer(text):
        name = next(group for group in match.groups() if group)
        end = _closing(text, match.end())
        lines = text.count("\n", match.start(), end)
        if name in KEYWORDS or end == 0 or lines > LONGEST or lines < 2:
            continue
        start = match.start()
        while start:
            line_start = text.rfind("\n", 0, start - 1) + 1
            if not COMMENT.match(text[line_start:start]):
                break
            start = line_start
        documented = start < match.start()
        body = match.end() + 1
        yield Function(name, start, body, end, documented, lines + 1 in SHORT)


def _closing(text: str, start: int) -> int:
    """Offset after the brace that closes the one before `start`; 0 if there is none."""
    depth = 1
    for brace in re.finditer(r"[{}]", text[start : start + 8000]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start + brace.end()
    return 0
