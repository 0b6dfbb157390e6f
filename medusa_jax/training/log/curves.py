"""`<workdir>/curves.png`: losses, accuracies, learning rate and estimates of a run so far."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from medusa_jax.plots.style import ACCENT, INK, finish, new_figure, save_figure
from medusa_jax.whole_files import Json

# One colour per head, legible on white and on black; the backbone's metrics are grey.
COLOURS = ("#3a87c8", ACCENT, "#3d9a5b", "#9a6fd0", "#c2971c", "#c85a8e", "#4fa9a9", INK)
# Charts in reading order: title, fields of a record, whether the axis is logarithmic.
CHARTS = (
    ("loss (nats)", ("loss", "lm_loss"), False),
    ("top-1 accuracy", ("top1", "lm_top1"), False),
    ("top-5 accuracy", ("top5", "lm_top5"), False),
    ("learning rate", ("lr",), False),
    ("gradient norm", ("gradient_norm",), True),
    ("estimated accepted length", ("accepted_length_chain", "accepted_length_tree"), False),
)

# Curves with more points are smoothed, with windows of a twentieth of them.
SMOOTHED = 20

Points = dict[str, tuple[list[float], list[float]]]


def read_log(path: Path) -> list[Json]:
    """Records of log.jsonl, without lines cut off by a kill; none if there is no file."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def series(records: Sequence[Json], kind: str, fields: Sequence[str]) -> Points:
    """Curves by label: (steps, values). A list is one curve per head.

    Example: [{"step": 1, "kind": "train", "loss": [3, 4]}], "train", ["loss"] ->
    {"head 1": ([1], [3]), "head 2": ([1], [4])}.
    """
    found: Points = {}
    for record in records:
        for field in fields if record.get("kind") == kind else ():
            value = record.get(field)
            if value is None:
                continue
            several = isinstance(value, list)
            values = value if several else [value]
            for i, x in enumerate(values, start=1):
                label = f"head {i}" if several else field.removeprefix("accepted_length_")
                if field.startswith("lm_") or (several and len(values) == 1):
                    label = "backbone"
                steps, curve = found.setdefault(label, ([], []))
                steps.append(record["step"])
                curve.append(float("nan") if x is None else x)  # a skipped step
    return found


def smoothed(curve: Sequence[float]) -> list[float]:
    """Moving average over a twentieth of the curve; NaN is left out.

    Example: 41 points: point 20 becomes the mean of 19, 20 and 21, point 0 that of 0 and 1.
    """
    half = max(len(curve) // (2 * SMOOTHED), 1)
    windows = (curve[max(i - half, 0) : i + half + 1] for i in range(len(curve)))
    finite = ([x for x in window if x == x] for window in windows)
    return [sum(window) / len(window) if window else float("nan") for window in finite]


def draw_run(records: Sequence[Json], path: str | Path) -> Path:
    """Draw a chart per logged metric: lines for training, dots for held-out text.

    Long training curves are thin, with a thick smoothed curve.
    """
    drawn = []
    for title, fields, log in CHARTS:
        train, held_out = (series(records, kind, fields) for kind in ("train", "eval"))
        if train or held_out:
            drawn.append((title, train, held_out, log))
    columns = min(3, max(1, len(drawn)))
    rows = max(1, -(-len(drawn) // columns))
    figure = new_figure(3.6 * columns, 2.7 * rows)
    for place, (title, train, held_out, log) in enumerate(drawn, 1):
        axes = figure.add_subplot(rows, columns, place)
        labels = list(dict.fromkeys([*train, *held_out]))
        for i, label in enumerate(labels):
            colour = INK if label == "backbone" else COLOURS[i % len(COLOURS)]
            dots = {"marker": "o", "markersize": 3.5, "linewidth": 0.8, "linestyle": ":"}
            if label in train:
                steps, curve = train[label]
                smooth = len(curve) > SMOOTHED and title != "learning rate"
                raw = {"linewidth": 0.6, "alpha": 0.35} if smooth else {"linewidth": 1.1}
                axes.plot(
                    steps, curve, color=colour, label=None if smooth else label, **raw
                )
                if smooth:
                    axes.plot(
                        steps, smoothed(curve), color=colour, linewidth=1.3, label=label
                    )
            if label in held_out:
                name = label if label not in train else None
                axes.plot(*held_out[label], color=colour, label=name, **dots)
        if log:
            axes.set_yscale("log")
        if len(labels) > 1 or held_out:
            axes.legend(frameon=False, labelcolor=INK, fontsize=7)
        finish(axes, title, "step", size=7)
    return save_figure(figure, path)
