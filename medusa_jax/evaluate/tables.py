"""Markdown tables, written one way."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; cells are shown by `str`.

    Example: ["a", "b"], [[1, "x"]] gives "| a | b |", "|---|---|", "| 1 | x |".
    """
    lines = [" | ".join(header), "---|" * len(header)]
    lines += [" | ".join(map(str, row)) for row in rows]
    return "\n".join(f"|{x}" if i == 1 else f"| {x} |" for i, x in enumerate(lines))
