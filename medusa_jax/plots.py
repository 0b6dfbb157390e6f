"""Pictures: a draft tree, the curves it was chosen by, and text coloured by accepted depth.

All of them are legible on a light and on a dark page: the charts have a transparent ground
and ink of medium grey, the text picture carries colours for both. Matplotlib is loaded when
a chart is drawn; the text picture is SVG written here and needs nothing.
"""

import itertools
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from medusa_jax.errors import UserError

INK = "#7a828c"
ACCENT = "#e0672b"
# Fill of accepted tokens by depth 1, 2, ...; deeper ones take the last. (light, dark)
DEPTH_COLOURS = (
    ("#cfe3ff", "#1f4470"),
    ("#c3f0cf", "#17532c"),
    ("#fbeaa0", "#5e4c0c"),
    ("#fdd3ae", "#6d3a12"),
    ("#fac6e0", "#6b2149"),
    ("#dcd2fd", "#46307d"),
)

TreePath = tuple[int, ...]


def new_figure(width: float, height: float):
    """A matplotlib figure outside pyplot: no window, no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "drawing charts needs matplotlib: pip install 'medusa-jax[plots]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, transparent=True, dpi=150)
    except ValueError as error:
        raise UserError(f"cannot draw {path}: {error}") from None
    return path


# --------------------------------------------------------------------------------------
# The tree
# --------------------------------------------------------------------------------------


def tree_layout(choices: Sequence[Sequence[int]]) -> dict[TreePath, tuple[float, int]]:
    """Place of every node, root () included: path -> (x, depth).

    Leaves stand side by side at x = 0, 1, 2, ... in order of rank, a parent stands over the
    middle of its first and last child.

        [[0], [1], [0, 0], [0, 1]]:  (0,0) 0, (0,1) 1, (1,) 2; (0,) over 0.5; () over 1.25
    """
    nodes = {(), *(tuple(c) for c in choices)}
    children: dict[TreePath, list[TreePath]] = {node: [] for node in nodes}
    for node in sorted(nodes - {()}):
        if node[:-1] not in children:
            raise UserError(
                f"the tree has {list(node)} but not its parent {list(node[:-1])}."
            )
        children[node[:-1]].append(node)
    place: dict[TreePath, tuple[float, int]] = {}
    leaves = 0
    # Depth first in order of rank puts leaves in order; parents follow their children.
    for node in sorted(nodes):
        if not children[node]:
            place[node] = (float(leaves), len(node))
            leaves += 1
    for node in sorted(nodes, key=len, reverse=True):
        if kids := children[node]:
            place[node] = ((place[kids[0]][0] + place[kids[-1]][0]) / 2, len(node))
    return place


def draw_tree(
    choices: Sequence[Sequence[int]],
    values: Mapping[TreePath, float] | Sequence[float] | None = None,
    *,
    path: str | Path,
    title: str = "",
) -> Path:
    """Draws a draft tree, the root on top, each node labelled with its rank.

    values: how often each node is accepted (0..1), in the order of `choices` or by path;
    they set width and colour of the edge above a node and are printed in small trees.
    The format follows the suffix of `path` (.svg, .png, .pdf).
    """
    place = tree_layout(choices)
    if values is not None and not isinstance(values, Mapping):
        if len(values) != len(choices):
            raise UserError(f"{len(values)} values for a tree of {len(choices)} nodes.")
        values = {tuple(c): float(v) for c, v in zip(choices, values, strict=True)}
    n_leaves = 1 + max(x for x, _ in place.values())
    depth = max(d for _, d in place.values())
    figure = new_figure(min(16.0, max(3.0, 0.42 * n_leaves + 1.0)), 0.95 * depth + 1.0)
    axes = figure.subplots()
    axes.set_axis_off()
    from matplotlib.colors import LinearSegmentedColormap

    # Grey to orange: both ends are visible on white and on black.
    colours = LinearSegmentedColormap.from_list("acceptance", [INK, ACCENT])
    small = n_leaves > 45
    for node, (x, d) in place.items():
        value = None if values is None else values.get(node, 1.0 if node == () else 0.0)
        colour = INK if value is None else colours(value)
        if node:
            above, _ = place[node[:-1]]
            width = 1.2 if value is None else 0.6 + 6.0 * value
            axes.plot([above, x], [1 - d, -d], color=colour, linewidth=width, zorder=1)
        axes.scatter([x], [-d], s=60 if small else 190, color=colour, zorder=2)
        if node:
            label = {"ha": "center", "va": "center", "zorder": 3}
            size = 5 if small else 8.5
            axes.text(x, -d, str(node[-1]), color="white", fontsize=size, **label)
            if value is not None and len(place) <= 24:
                text = f"{value:.2f}".removeprefix("0")
                axes.text(x + 0.28, -d, text, color=INK, fontsize=7, va="center")
    axes.set_xlim(-0.7, n_leaves - 0.3)
    axes.set_ylim(-depth - 0.4, 0.4)
    if title:
        axes.set_title(title, color=INK, fontsize=10)
    return save_figure(figure, path)


# --------------------------------------------------------------------------------------
# The curves
# --------------------------------------------------------------------------------------


def draw_curves(
    sizes: Sequence[int],
    tokens_per_step: Sequence[float],
    step_seconds: Sequence[float],
    *,
    path: str | Path,
    measured_tokens: Mapping[int, float] | None = None,
    title: str = "",
) -> Path:
    """Draws tokens per step, step latency and their ratio over the size of the tree.

    sizes: query tokens of a step (draft nodes + root), increasing; 1 is plain decoding.
    The size with the most tokens per second is marked in all three charts. measured_tokens:
    tokens per step that real runs had at some sizes, drawn as crosses.
    """
    if not len(sizes) == len(tokens_per_step) == len(step_seconds) or len(sizes) == 0:
        raise UserError(
            f"curves of different length: {len(sizes)} sizes, {len(tokens_per_step)} "
            f"tokens per step, {len(step_seconds)} latencies."
        )
    speed = [t / s for t, s in zip(tokens_per_step, step_seconds, strict=True)]
    best = max(range(len(sizes)), key=speed.__getitem__)
    charts = (
        ("tokens per step", list(tokens_per_step), "{:.2f}"),
        ("step latency (ms)", [1000 * s for s in step_seconds], "{:.2f} ms"),
        ("tokens per second", speed, "{:.0f}"),
    )
    figure = new_figure(10.5, 3.1)
    for axes, (name, values, form) in zip(figure.subplots(1, 3), charts, strict=True):
        axes.plot(sizes, values, color="#3a87c8", marker="o", markersize=3.5)
        if measured_tokens and name == "tokens per step":
            x, y = list(measured_tokens), list(measured_tokens.values())
            axes.plot(x, y, "x", color=ACCENT, label="measured")
            axes.legend(frameon=False, labelcolor=INK, fontsize=8)
        axes.axvline(sizes[best], color=ACCENT, linewidth=1, linestyle=":")
        axes.plot([sizes[best]], [values[best]], "o", color=ACCENT)
        note = form.format(values[best]) + f" at {sizes[best]}"
        below = 1 if values is speed else -11
        axes.annotate(
            note,
            (sizes[best], values[best]),
            (8, below),
            textcoords="offset points",
            color=ACCENT,
            fontsize=8,
        )
        axes.set_ylim(0, 1.12 * max(values))
        axes.set_title(name, color=INK, fontsize=10)
        axes.set_xlabel("tokens in a step (root included)", color=INK, fontsize=8)
        _mute(axes)
    if title:
        figure.suptitle(title, color=INK, fontsize=10)
    return save_figure(figure, path)


# --------------------------------------------------------------------------------------
# Drafters side by side
# --------------------------------------------------------------------------------------


def draw_drafters(
    runs: Mapping[str, Sequence[Mapping]],
    speeds: Mapping[str, Sequence[Mapping]],
    curves: Mapping,
    path: str | Path,
) -> Path:
    """Three charts: head accuracy, accepted length against speed-up, held-out accuracy.

    Args:
      runs: per drafter what `compare_drafters.measure.measure_one` found for each seed.
      speeds: per drafter what `compare_drafters.measure.race` found.
      curves: per drafter and seed the held-out records of training (step, top1 per head).
      path: the file to write; its ending gives the format.
    """
    figure = new_figure(12, 3.8)
    heads, lengths, training = figure.subplots(1, 3)
    colours = dict(
        zip(runs, ["#7a828c", "#5b9bd5", "#1f5fa8", "#e8a13c", "#d0451b", "#4c9f58"])
    )

    def mean(rows: Sequence[Sequence[float]]) -> list[float]:
        return [sum(column) / len(rows) for column in zip(*rows)]

    for name, found in runs.items():
        for top, style in (("top1", "o-"), ("top5", "o:")):
            accuracy = mean([seed[top] for seed in found])
            label = name if top == "top1" else None
            heads.plot(
                range(1, len(accuracy) + 1),
                accuracy,
                style,
                ms=3,
                color=colours[name],
                label=label,
            )
        accepted = [row["mean_accepted_length"] for row in found[0]["decoded"]]
        speed = [row["speedup"] for row in speeds[name]]
        lengths.plot(accepted, speed, "o-", ms=4, lw=0.8, color=colours[name])
        for records in curves.get(name, ()):
            training.plot(
                [r["step"] for r in records],
                [sum(r["top1"]) / len(r["top1"]) for r in records],
                lw=1,
                color=colours[name],
            )
    heads.set(xlabel="head", ylabel="accuracy (top-1 solid, top-5 dotted)", ylim=(0, 1))
    heads.legend(frameon=False, labelcolor=INK, fontsize=8)
    lengths.set(xlabel="mean accepted length", ylabel="speed-up")
    training.set(xlabel="training step", ylabel="held-out top-1, mean of the heads")
    for axes in (heads, lengths, training):
        axes.set_facecolor("none")
        axes.tick_params(colors=INK)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(INK)
    return save_figure(figure, path)


@dataclass
class Chart:
    """Lines over one axis.

    Attributes:
      title, xlabel: what is drawn over what.
      lines: label -> (x, y).
      levels: label -> y of a horizontal line (a baseline).
    """

    title: str
    xlabel: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    levels: Mapping[str, float] = field(default_factory=dict)


# Distinct on light and dark ground, and in print by marker.
LINE_STYLES = (("#3a87c8", "o"), (ACCENT, "s"), ("#3f9b58", "^"), ("#9568c4", "D"))


def draw_lines(charts: Sequence[Chart], *, path: str | Path, title: str = "") -> Path:
    """Draws charts side by side, each with its legend."""
    figure = new_figure(4.2 * len(charts), 3.3)
    places = figure.subplots(1, len(charts), squeeze=False)[0]
    for axes, chart in zip(places, charts, strict=True):
        for (label, (x, y)), (colour, marker) in zip(
            chart.lines.items(), itertools.cycle(LINE_STYLES), strict=False
        ):
            axes.plot(x, y, color=colour, marker=marker, markersize=3.5, label=label)
        for (label, level), dash in zip(
            chart.levels.items(), itertools.cycle((":", "--", "-.")), strict=False
        ):
            axes.axhline(level, color=INK, linewidth=1.2, linestyle=dash, label=label)
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
        axes.set_title(chart.title, color=INK, fontsize=10)
        axes.set_xlabel(chart.xlabel, color=INK, fontsize=8)
        _mute(axes)
    if title:
        figure.suptitle(title, color=INK, fontsize=10)
    return save_figure(figure, path)


def _mute(axes) -> None:
    """Frame, ticks and grid in grey."""
    axes.tick_params(colors=INK, labelsize=8)
    axes.grid(color=INK, alpha=0.2, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_color(INK)


# --------------------------------------------------------------------------------------
# The text
# --------------------------------------------------------------------------------------

_ADVANCE, _LINE, _MARGIN = 8.4, 21, 14  # pixels: one column, one row, the border
_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def _cells(segments: Sequence[tuple[str, int]], columns: int):
    """Runs of text that share row and segment: (row, column, width, text, depth).

    Tabs become four spaces, wide characters take two columns, combining marks none, and what
    XML cannot hold is shown as U+FFFD. A row that is full continues on the next one.
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


_NOT_XML = frozenset({0x7F, 0xFFFE, 0xFFFF})


def accepted_text_svg(
    segments: Sequence[tuple[str, int]], *, columns: int = 88, caption: str = ""
) -> str:
    """SVG of generated text in which each accepted draft token is coloured by its depth.

    segments: (text, depth) per token in order. Depth 0 is text that the backbone itself
    gave (the prompt, and the last token of each step), depth d >= 1 a draft token accepted
    at depth d of the tree. Light and dark colours follow the reader's setting.
    """
    if columns < 8:
        raise UserError(f"{columns} columns are too few for a picture of text.")
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
        # Spaces are left out of the text element: some viewers collapse them. textLength keeps
        # columns aligned whatever font the reader has.
        if inner := text.strip(" "):
            x += _ADVANCE * (len(text) - len(text.lstrip(" ")))
            width -= len(text) - len(inner)
            body.append(
                f'<text x="{x:.1f}" y="{y + 15}" textLength="{width * _ADVANCE:.1f}" '
                f'lengthAdjust="spacingAndGlyphs">{escape(inner)}</text>'
            )
    y = _MARGIN + rows * _LINE + 10
    legend = ["accepted at depth", *range(1, deepest + 1)] if deepest else []
    x = float(_MARGIN)
    for item in legend:
        label = str(item)
        if isinstance(item, int):
            label += "+" if item == len(DEPTH_COLOURS) else ""
            body.append(
                f'<rect class="d{item}" x="{x:.1f}" y="{y}" width="24" height="17" rx="3"/>'
            )
            body.append(f'<text class="n m" x="{x + 12:.1f}" y="{y + 13}">{label}</text>')
            x += 30
        else:
            body.append(f'<text class="n" x="{x:.1f}" y="{y + 13}">{label}</text>')
            x += 7.2 * len(label) + 6
    height = y + (27 if legend else 0)
    if caption:
        body.append(
            f'<text class="n" x="{_MARGIN}" y="{height + 10}">{escape(caption)}</text>'
        )
        height += 24
    used = max((column + width for _, column, width, _, _ in runs), default=0)
    note = 7.2 * max(len(caption), 52 if legend else 0)
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


def draw_accepted_text(
    segments: Sequence[tuple[str, int]],
    path: str | Path,
    *,
    columns: int = 88,
    caption: str = "",
) -> Path:
    """Writes `accepted_text_svg` to `path`, which must end in .svg."""
    path = Path(path)
    if path.suffix != ".svg":
        raise UserError(f"{path}: a picture of text is SVG, the name must end in .svg.")
    path.parent.mkdir(parents=True, exist_ok=True)
    svg = accepted_text_svg(segments, columns=columns, caption=caption)
    path.write_text(svg, encoding="utf-8")
    return path
