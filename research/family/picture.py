"""A picture that compares the drafters."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from medusa_jax.plots.style import INK, new_figure, save_figure


def draw_drafters(
    runs: Mapping[str, Sequence[Mapping]],
    speeds: Mapping[str, Sequence[Mapping]],
    curves: Mapping,
    path: str | Path,
) -> Path:
    """Draw three charts: head accuracy, accepted length against speed-up, held-out accuracy.

    Args:
      runs: per drafter the results of `measure.measure_one` for each seed.
      speeds: per drafter the results of `measure.race`.
      curves: per drafter and seed the held-out records of training (step, top1 per head).
      path: the file to write; its suffix selects the format.
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
