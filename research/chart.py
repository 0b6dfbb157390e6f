"""`python -m research chart`: docs/speed.svg, the bars beside llama.cpp, from the table in docs/results.md."""

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from medusa_jax.commands.flags import CommandLine, flag
from medusa_jax.console import inform
from medusa_jax.plots.style import ACCENT, INK
from medusa_jax.whole_files import read_text, write_text

RESULTS = Path(__file__).parents[1] / "docs" / "results.md"
TABLE = "| engine |"
# Pixels: of the names, of the longest bar, and of a row.
NAMES, BAR, ROW = 270, 390, 34


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Draw tokens per second of the engines that were measured side by side."""

    out: str = flag("SVG file to write", str(RESULTS.with_name("speed.svg")))


def figures(page: str) -> list[tuple[str, float]]:
    """(engine, tokens/s) in the first column of the table of engines, the first figure of a cell, slowest first."""
    table = page[page.index(TABLE) :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    found = [
        (name, float(n[0]))
        for name, cell, *_ in cells
        if (n := re.findall(r"[\d.]+", cell))
    ]
    return sorted(found, key=lambda row: row[1])


def bars(rows: list[tuple[str, float]], title: str) -> str:
    """Horizontal bars as SVG, legible on light and dark pages; ours in orange."""
    most = max(value for _, value in rows)
    height = ROW * (len(rows) + 1) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {NAMES + BAR + 70} {height}" '
        f'font-family="sans-serif" font-size="15" fill="{INK}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<text x="0" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    for i, (name, value) in enumerate(rows, 1):
        y, width = ROW * i, BAR * value / most
        colour = ACCENT if name.startswith("medusa_jax") else INK
        parts += [
            f'<text x="{NAMES - 10}" y="{y + 20}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{NAMES}" y="{y + 4}" width="{width:.0f}" height="22" rx="3" fill="{colour}"/>',
            f'<text x="{NAMES + width + 8:.0f}" y="{y + 20}">{value:.0f}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


def run(flags: Flags) -> int:
    rows = figures(read_text(RESULTS))
    write_text(
        flags.out, bars(rows, "SmolLM2-135M, 4-bit file, two CPU cores: tokens per second")
    )
    inform(f"wrote {flags.out}")
    return 0


main = CommandLine("python -m research chart", Flags, run)
