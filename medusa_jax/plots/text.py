"""Text as SVG, each token coloured by the tree depth it was accepted at.

The file has colours for light and dark pages. No library is needed.
"""

import unicodedata
from collections.abc import Sequence
from html import escape
from pathlib import Path

from medusa_jax.errors import UserError
from medusa_jax.plots.style import INK
from medusa_jax.whole_files import write_text

# Fill of accepted tokens by depth 1, 2, ...; deeper ones use the last. (light, dark)
DEPTH_COLOURS = (
    ("#cfe3ff", "#1f4470"),
    ("#c3f0cf", "#17532c"),
    ("#fbeaa0", "#5e4c0c"),
    ("#fdd3ae", "#6d3a12"),
    ("#fac6e0", "#6b2149"),
    ("#dcd2fd", "#46307d"),
)
_ADVANCE, _LINE, _MARGIN = 8.4, 21, 14  # pixels: one column, one row, the border
_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_NOT_XML = frozenset({0x7F, 0xFFFE, 0xFFFF})


def _cells(segments: Sequence[tuple[str, int]], columns: int):
    """Runs of text that share row and segment: (row, column, width, text, depth).

    Tabs become four spaces, wide characters take two columns, combining marks none, and characters
    that XML forbids become U+FFFD. A full row continues on the next one.
    """
    row = column = 0
    runs: list[tuple[int, int, int, str, int]] = []
    for text, depth in segments:
        text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ")
        begin, piece = column, ""
        for char in text:
            code = ord(char)
            if char != "\n" and (code < 32 or 0xD800 <= code < 0xE000 or code in _NOT_XML):
                char = "\ufffd"
            wide = unicodedata.east_asian_width(char) in "WF"
            width = 0 if unicodedata.combining(char) else 2 if wide else 1
            if char == "\n" or column + width > columns:
                if piece:
                    runs.append((row, begin, column - begin, piece, depth))
                row, column, begin, piece = row + 1, 0, 0, ""
            if char != "\n":
                piece += char
                column += width
        if piece:
            runs.append((row, begin, column - begin, piece, depth))
    return runs, row + 1


def accepted_text_svg(segments: Sequence[tuple[str, int]], *, columns: int = 88) -> str:
    """Return an SVG of generated text with each accepted draft token coloured by its depth.

    segments: (text, depth) per token in order. Depth 0 is text from the backbone or the prompt
    (the prompt itself, and the last token of each step), depth d >= 1 a draft token accepted
    at depth d of the tree. Light and dark colours follow the reader's setting.
    """
    runs, rows = _cells(segments, columns)
    deepest = min(max((depth for _, depth in segments), default=0), len(DEPTH_COLOURS))
    body = []
    for row, column, width, text, depth in runs:
        x, y = _MARGIN + column * _ADVANCE, _MARGIN + row * _LINE
        if depth > 0 and width:
            kind = f"d{min(depth, len(DEPTH_COLOURS))}"
            body.append(
                f'<rect class="{kind}" x="{x + 0.5:.1f}" y="{y + 1}" '
                f'width="{width * _ADVANCE - 1:.1f}" height="{_LINE - 2}" rx="3"/>'
            )
        # Leading and trailing spaces are left out of the text element, since some viewers collapse
        # them. textLength keeps columns aligned in any font.
        if inner := text.strip(" "):
            x += _ADVANCE * (len(text) - len(text.lstrip(" ")))
            width -= len(text) - len(inner)
            body.append(
                f'<text x="{x:.1f}" y="{y + 15}" textLength="{width * _ADVANCE:.1f}" '
                f'lengthAdjust="spacingAndGlyphs">{escape(inner)}</text>'
            )
    y = _MARGIN + rows * _LINE + 10
    if deepest:
        body.append(f'<text class="n" x="{_MARGIN}" y="{y + 13}">accepted at depth</text>')
    for depth in range(1, deepest + 1):
        x = _MARGIN + 98 + 30 * depth
        label = f"{depth}+" if depth == len(DEPTH_COLOURS) else str(depth)
        body.append(
            f'<rect class="d{depth}" x="{x}" y="{y}" width="24" height="17" rx="3"/>'
            f'<text class="n m" x="{x + 12}" y="{y + 13}">{label}</text>'
        )
    height = y + (27 if deepest else 0)
    used = max((column + width for _, column, width, _, _ in runs), default=0)
    note = 7.2 * 52 if deepest else 0
    total = max(used * _ADVANCE, note) + 2 * _MARGIN
    light = "".join(f".d{i + 1}{{fill:{c}}}" for i, (c, _) in enumerate(DEPTH_COLOURS))
    dark = "".join(f".d{i + 1}{{fill:{c}}}" for i, (_, c) in enumerate(DEPTH_COLOURS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="{height}" '
        f'viewBox="0 0 {total:.0f} {height}" role="img">\n<style>'
        f"text{{font:14px {_FONT};fill:#1f2328;white-space:pre}}"
        f".n{{font-size:12px;fill:{INK}}}.m{{text-anchor:middle;fill:#1f2328}}"
        f".g{{fill:#fff;stroke:#d0d7de}}{light}"
        f"@media(prefers-color-scheme:dark){{text,.m{{fill:#e6edf3}}.n{{fill:{INK}}}"
        f".m{{fill:#e6edf3}}.g{{fill:#0d1117;stroke:#30363d}}{dark}}}"
        f'</style>\n<rect class="g" x="0.5" y="0.5" width="{total - 1:.0f}" '
        f'height="{height - 1}" rx="6"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def draw_accepted_text(segments: Sequence[tuple[str, int]], path: str | Path) -> Path:
    """Write `accepted_text_svg` to `path`, which must end in .svg."""
    path = Path(path)
    if path.suffix != ".svg":
        raise UserError(f"{path}: pictures of text are SVG, so the name must end in .svg.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, accepted_text_svg(segments))
    return path
