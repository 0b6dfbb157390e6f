"""Charts: lines over one axis, such as the curves that choose a tree."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from medusa_jax.plots.style import ACCENT, INK, finish, new_figure, save_figure


@dataclass
class Chart:
    """Lines over one axis.

    Attributes:
      title: the quantity on the y axis; xlabel: the one on the x axis.
      lines: label -> (x, y).
      levels: label -> y of a horizontal line (a baseline).
      points: label -> (x, y), drawn without a line.
    """

    title: str
    xlabel: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    levels: Mapping[str, float] = field(default_factory=dict)
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(
        default_factory=dict
    )


# Distinct on light and dark backgrounds, and in print by marker.
LINE_STYLES = (
    ("#3a87c8", "o"), (ACCENT, "s"), ("#3f9b58", "^"), ("#9568c4", "D"),
    ("#c9a227", "v"), ("#c0392b", "P"), ("#17a2a2", "X"), ("#8a6d5b", "*"),
)  # fmt: skip
# Most names of a legend inside the chart; it is below for more.
LEGEND_ROWS = 4


def draw_lines(charts: Sequence[Chart], *, path: str | Path) -> Path:
    """Draw charts side by side, each with its legend."""
    n_labels = max(len([*c.lines, *c.levels, *c.points]) for c in charts)
    legend_below = n_labels > LEGEND_ROWS
    height = 3.3 + 0.2 * n_labels if legend_below else 3.3
    figure = new_figure(4.2 * len(charts), height)
    places = figure.subplots(1, len(charts), squeeze=False)[0]
    for axes, chart in zip(places, charts, strict=True):
        for (label, (x, y)), (colour, marker) in zip(
            chart.lines.items(), itertools.cycle(LINE_STYLES), strict=False
        ):
            axes.plot(x, y, color=colour, marker=marker, markersize=3.5, label=label)
        for (label, (x, y)), (colour, marker) in zip(
            chart.points.items(), reversed(LINE_STYLES), strict=False
        ):
            style = {"s": 26, "alpha": 0.8, "zorder": 3, "label": label}
            axes.scatter(x, y, color=colour, marker=marker, **style)
        for (label, level), dash in zip(
            chart.levels.items(), itertools.cycle((":", "--", "-.")), strict=False
        ):
            axes.axhline(level, color=INK, linewidth=1.2, linestyle=dash, label=label)
        place = {}
        if legend_below:
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
        axes.legend(frameon=False, labelcolor=INK, fontsize=8, **place)
        finish(axes, chart.title, chart.xlabel)
    return save_figure(figure, path)


def draw_curves(
    sizes: Sequence[int],
    tokens_per_step: Sequence[float],
    step_seconds: Sequence[float],
    *,
    path: str | Path,
) -> Path:
    """Draw tokens per step, step latency and their ratio over the size of the tree.

    The size with the most tokens per second is marked in all three charts.

    Args:
      sizes: query tokens of a step (draft nodes + root), increasing; 1 is plain decoding.
    """
    speed = [t / s for t, s in zip(tokens_per_step, step_seconds, strict=True)]
    at = max(range(len(sizes)), key=speed.__getitem__)
    charts = []
    for title, values in (
        ("tokens per step", tokens_per_step),
        ("step latency (ms)", [1000 * s for s in step_seconds]),
        ("tokens per second", speed),
    ):
        mark = {f"{values[at]:.4g} at {sizes[at]}": ([sizes[at]], [values[at]])}
        line = {"": (sizes, values)}
        charts.append(Chart(title, "tokens in a step (root included)", line, points=mark))
    return draw_lines(charts, path=path)
