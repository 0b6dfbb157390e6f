"""`<workdir>/curves.png`: losses, accuracies, learning rate and estimates of a run so far."""

import math
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

Points = dict[str, tuple[list[float], list[float]]]


def series(records: Sequence[Json], kind: str, fields: Sequence[str]) -> Points:
    """Curves by label: (steps, values). A list is one curve per head.

    Example: [{"step": 1, "kind": "train", "loss": [3, 4]}], "train", ["loss"] ->
    {"head 1": ([1], [3]), "head 2": ([1], [4])}.
    """
    found: Points = {}
    logged = [
        (r["step"], field, r[field])
        for r in records
        for field in fields
        if r.get("kind") == kind and r.get(field) is not None
    ]
    for step, field, value in logged:
        several = isinstance(value, list)
        for i, x in enumerate(value if several else [value], start=1):
            label = f"head {i}" if several else field.removeprefix("accepted_length_")
            if field.startswith("lm_") or (several and len(value) == 1):
                label = "backbone"
            steps, curve = found.setdefault(label, ([], []))
            steps.append(step)
            curve.append(math.nan if x is None else x)  # a skipped step
    return found


def draw_run(records: Sequence[Json], path: str | Path) -> Path:
    """Draw a chart per logged metric: lines for training, dots for held-out text."""
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
                axes.plot(*train[label], color=colour, label=label, linewidth=1.1)
            if label in held_out:
                name = label if label not in train else None
                axes.plot(*held_out[label], color=colour, label=name, **dots)
        if log:
            axes.set_yscale("log")
        if len(labels) > 1 or held_out:
            axes.legend(frameon=False, labelcolor=INK, fontsize=7)
        finish(axes, title, "step", size=7)
    return save_figure(figure, path)
