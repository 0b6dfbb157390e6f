"""Bars over categories, one colour a series."""

from collections.abc import Mapping
from pathlib import Path

from medusa_jax.plots.charts import LINE_STYLES
from medusa_jax.plots.style import INK, mute, new_figure, save_figure


def draw_bars(
    charts: Mapping[str, Mapping[str, Mapping[str, float]]],
    *,
    path: str | Path,
    level: float | None = None,
) -> Path:
    """Draw charts one below the other.

    charts: title -> label of a series -> category -> value; the first series gives the order of
    categories. A legend is drawn for two or more series.
    level: a horizontal line in every chart, such as plain decoding.
    """
    categories = list(next(iter(next(iter(charts.values())).values())))
    figure = new_figure(max(5.0, 0.75 * len(categories)), 2.8 * len(charts))
    places = figure.subplots(len(charts), 1, squeeze=False)[:, 0]
    for axes, (name, series) in zip(places, charts.items(), strict=True):
        width = 0.8 / len(series)
        for i, (label, values) in enumerate(series.items()):
            colour, _ = LINE_STYLES[i % len(LINE_STYLES)]
            x = [n + (i + 0.5) * width - 0.4 for n in range(len(categories))]
            heights = [values[category] for category in categories]
            axes.bar(x, heights, width, color=colour, label=label)
        if level is not None:
            axes.axhline(level, color=INK, linewidth=1.2, linestyle=":")
        axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
        if len(series) > 1:
            axes.legend(frameon=False, labelcolor=INK, fontsize=8)
        axes.set_title(name, color=INK, fontsize=10)
        mute(axes)
    return save_figure(figure, path)
