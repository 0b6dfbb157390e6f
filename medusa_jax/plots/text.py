"""Text as SVG, each accepted draft coloured by its tree depth, copied tokens in grey.

The file has colours for light and dark pages. No library is needed.
"""

import itertools
import unicodedata
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from medusa_jax.errors import UserError
from medusa_jax.plots.style import INK
from medusa_jax.whole_files import write_text

# Fill (light, dark) of accepted tokens by depth 1, 2, ..., deeper ones as d6, and of copied tokens.
COLOURS = {
    "d1": ("#cfe3ff", "#1f4470"),
    "d2": ("#c3f0cf", "#17532c"),
    "d3": ("#fbeaa0", "#5e4c0c"),
    "d4": ("#fdd3ae", "#6d3a12"),
    "d5": ("#fac6e0", "#6b2149"),
    "d6": ("#dcd2fd", "#46307d"),
    "c": ("#eceff2", "#2b3138"),
}
DEEPEST = 6
_ADVANCE, _LINE, _MARGIN = 8.4, 21, 14  # pixels: one column, one row, the border
_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_NOT_XML = frozenset({0x7F, 0xFFFE, 0xFFFF})


class _Run(NamedTuple):
    """Characters of one token in one row."""

    row: int
    column: int
    width: int
    text: str
    depth: int


def _rows(
    segments: Sequence[tuple[str, int]], columns: int
) -> list[list[tuple[str, int, int]]]:
    """Rows of (character, columns, number of its token), broken between words.

    Tabs become four spaces, wide characters take two columns, combining marks none, and characters
    that XML forbids become U+FFFD. The blank at which a row is broken is left out.
    """
    rows: list[list[tuple[str, int, int]]] = [[]]
    word = used = 0  # of the last row: where its last word begins, its columns
    for token, (text, _) in enumerate(segments):
        for char in text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    "):
            code = ord(char)
            if char == "\n":
                rows.append([])
                word = used = 0
                continue
            if code < 32 or 0xD800 <= code < 0xE000 or code in _NOT_XML:
                char = "\ufffd"
            is_wide = unicodedata.east_asian_width(char) in "WF"
            width = 0 if unicodedata.combining(char) else 2 if is_wide else 1
            if used + width > columns:
                row = rows[-1]
                indented = all(one == " " for one, _, _ in row[:word])
                cut = len(row) if char == " " or indented else word
                blank = cut > 0 and not indented and row[cut - 1][0] == " "
                end = cut - 1 if blank else cut
                rows[-1:] = [row[:end], row[cut:]]
                word, used = 0, sum(one for _, one, _ in rows[-1])
                if char == " ":
                    continue
            rows[-1].append((char, width, token))
            used += width
            if char == " ":
                word = len(rows[-1])
    return rows


def _runs(segments: Sequence[tuple[str, int]], columns: int) -> tuple[list[_Run], int]:
    """Characters that share row and token, and the number of rows."""
    rows = _rows(segments, columns)
    runs = []
    for number, row in enumerate(rows):
        column = 0
        for token, group in itertools.groupby(row, lambda cell: cell[2]):
            chars, widths, _ = zip(*group)
            runs.append(
                _Run(number, column, sum(widths), "".join(chars), segments[token][1])
            )
            column += sum(widths)
    return runs, len(rows)


def accepted_text_svg(segments: Sequence[tuple[str, int]], *, columns: int = 88) -> str:
    """Return an SVG of generated text with each accepted draft token coloured by its depth.

    Args:
      segments: (text, depth) per token in order, depths as in `Result.draft_depths`. Depth 0 is the
        prompt and the model's own tokens, a negative depth a token copied from the text. Light and
        dark colours follow the reader's setting.
      columns: characters of a row.
    """
    runs, rows = _runs(segments, columns)
    body = []
    for row, column, width, text, depth in runs:
        x, y = _MARGIN + column * _ADVANCE, _MARGIN + row * _LINE
        # Without its blanks, which some viewers collapse; a token of blanks alone keeps its box.
        if inner := text.strip(" "):
            x += _ADVANCE * (len(text) - len(text.lstrip(" ")))
            width -= len(text) - len(inner)
        if depth and width:
            body.append(
                _box(_class(depth), x + 0.5, y + 1, width * _ADVANCE - 1, _LINE - 2)
            )
        if inner:  # textLength keeps columns aligned in any font
            body.append(
                f'<text x="{x:.1f}" y="{y + 15}" textLength="{width * _ADVANCE:.1f}" '
                f'lengthAdjust="spacingAndGlyphs">{escape(inner)}</text>'
            )
    y = _MARGIN + rows * _LINE + 10
    legend, legend_width = _legend({depth for _, depth in segments}, y)
    height = y + (27 if legend else 0)
    n_columns = max((run.column + run.width for run in runs), default=0)
    total = max(n_columns * _ADVANCE, legend_width) + 2 * _MARGIN
    light, dark = (
        "".join(f".{name}{{fill:{pair[i]}}}" for name, pair in COLOURS.items())
        for i in (0, 1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="{height}" '
        f'viewBox="0 0 {total:.0f} {height}" role="img">\n<style>'
        f"text{{font:14px {_FONT};fill:#1f2328;white-space:pre}}"
        f".n{{font-size:12px;fill:{INK}}}.m{{text-anchor:middle;fill:#1f2328}}"
        f".g{{fill:#fff;stroke:#d0d7de}}.c{{stroke:{INK};stroke-dasharray:3 2}}{light}"
        f"@media(prefers-color-scheme:dark){{text,.m{{fill:#e6edf3}}.n{{fill:{INK}}}"
        f".m{{fill:#e6edf3}}.g{{fill:#0d1117;stroke:#30363d}}{dark}}}"
        f'</style>\n<rect class="g" x="0.5" y="0.5" width="{total - 1:.0f}" '
        f'height="{height - 1}" rx="6"/>\n' + "\n".join([*body, *legend]) + "\n</svg>\n"
    )


def _class(depth: int) -> str:
    """The style of an accepted draft."""
    return "c" if depth < 0 else f"d{min(depth, DEEPEST)}"


def _box(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="3"/>'


def _legend(depths: set[int], y: float) -> tuple[list[str], float]:
    """Elements that explain the colours of these depths, in a row at `y`; and their width."""
    body: list[str] = []
    x = float(_MARGIN)
    shown: list[tuple[str, str, float]] = []
    if (deepest := min(max(depths, default=0), DEEPEST)) > 0:
        body.append(f'<text class="n" x="{x}" y="{y + 13}">drafted at depth</text>')
        x += 120
        labels = [str(depth) for depth in range(1, deepest + 1)]
        if deepest == DEEPEST:
            labels[-1] += "+"
        shown = [(f"d{depth}", label, 24) for depth, label in enumerate(labels, 1)]
    if min(depths, default=0) < 0:
        shown.append(("c", "copied from the text", 158))
    for kind, label, width in shown:
        body.append(_box(kind, x, y, width, 17))
        body.append(f'<text class="n m" x="{x + width / 2}" y="{y + 13}">{label}</text>')
        x += width + 6
    return body, x - _MARGIN


def draw_accepted_text(segments: Sequence[tuple[str, int]], path: str | Path) -> Path:
    """Write `accepted_text_svg` to `path`, which must end in .svg."""
    path = Path(path)
    if path.suffix != ".svg":
        raise UserError(f"{path}: pictures of text are SVG, so the name must end in .svg.")
    write_text(path, accepted_text_svg(segments))
    return path
