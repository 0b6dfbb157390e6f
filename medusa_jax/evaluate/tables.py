"""Tables and result files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from medusa_jax.console import inform
from medusa_jax.whole_files import write_json, write_text

Row = Mapping[str, Any]
# A cell: a format of the row's fields, or a function of the row.
Cell = str | Callable[[Row], str]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table with aligned columns; cells are shown by `str`.

    Example: ["a", "b"], [[1, "xyz"]] gives "| a | b   |", "|---|-----|", "| 1 | xyz |".
    """
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    aligned = ([x.ljust(n) for x, n in zip(row, widths)] for row in cells)
    head, *body = (f"| {' | '.join(row)} |" for row in aligned)
    return "\n".join([head, f"|{'|'.join('-' * (n + 2) for n in widths)}|", *body])


def table_of(rows: Sequence[Row], columns: Mapping[str, Cell]) -> str:
    """A Markdown table of rows; "-" where a field is None or missing.

    Example: [{"n": 2}, {"n": None}], {"speed-up": "{n:.1f}x"} gives "2.0x" and "-".
    """
    cells = [[_cell(row, cell) for cell in columns.values()] for row in rows]
    return markdown_table(list(columns), cells)


def _cell(row: Row, cell: Cell) -> str:
    try:
        return cell(row) if callable(cell) else cell.format_map(row)
    except (KeyError, TypeError):
        return "-"


def device_facts() -> dict[str, str]:
    """Date and device of a measurement."""
    import jax

    device = jax.devices()[0]
    return {
        "date": date.today().isoformat(),
        "device": f"{device.platform}: {device.device_kind}",
    }


def write_report(
    out: Path, name: str, facts: Row, rows: Sequence[Row], columns: Mapping[str, Cell], notes: str = ""
) -> None:  # fmt: skip
    """Write `facts` as name.json and the table of `rows` as name.md; print table and notes."""
    write_json(out / f"{name}.json", facts)
    text = table_of(rows, columns)
    write_text(out / f"{name}.md", text + "\n")
    print(text)
    if notes:
        print(f"\n{notes}")
    inform(f"wrote {out}/{name}.json and {name}.md")
