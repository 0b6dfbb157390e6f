"""Roofline charts: achieved FLOP/s over operational intensity."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from medusa_jax.plots.charts import LINE_STYLES
from medusa_jax.plots.style import INK, mute, new_figure, save_figure


def draw_roofline(
    charts: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    roofs: Mapping[str, tuple[float, float]],
    *,
    path: str | Path,
    title: str = "",
) -> Path:
    """Draw one chart per entry, both axes logarithmic.

    charts: title -> label -> (intensities in FLOPs per byte, FLOP/s), drawn as points.
    roofs: title -> (peak FLOP/s, bytes/s); the line is min(peak, bandwidth x intensity).
    """
    figure = new_figure(4.2 * len(charts), 3.5)
    places = figure.subplots(1, len(charts), squeeze=False)[0]
    for axes, (name, series) in zip(places, charts.items(), strict=True):
        peak, bandwidth = roofs[name]
        for (label, (x, y)), (colour, marker) in zip(
            series.items(), itertools.cycle(LINE_STYLES), strict=False
        ):
            axes.scatter(x, y, s=14, color=colour, marker=marker, label=label, alpha=0.8)
        ridge = peak / bandwidth
        seen = [v for x, _ in series.values() for v in x] or [ridge]
        ends = [min(ridge, *seen) / 2, ridge, max(ridge, *seen) * 2]
        roof = [min(peak, bandwidth * x) for x in ends]
        axes.plot(ends, roof, color=INK, linewidth=1.2, label="roof")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
        axes.set_title(name, color=INK, fontsize=10)
        axes.set_xlabel("operational intensity (FLOPs per byte)", color=INK, fontsize=8)
        axes.set_ylabel("FLOP/s", color=INK, fontsize=8)
        mute(axes)
    if title:
        figure.suptitle(title, color=INK, fontsize=10)
    return save_figure(figure, path)
