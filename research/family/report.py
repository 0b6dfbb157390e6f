"""Report of the measured runs: tables, the papers' orders, curves."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.plots import Chart, draw_lines
from medusa_jax.training.run_log import read_log
from medusa_jax.whole_files import Json

# Orders of mean accepted length in the papers; EAGLE's place is from Amphista's table 9.
ORDERS = (
    ("medusa", "hydra", "hydrapp", "eagle"),
    ("medusa", "amphista", "amphista_alpha", "eagle"),
)


def curve(run: Path) -> list[Json]:
    """Held-out records of a training, in order: step, top1 and trained_top1, both per head.

    trained_top1 is the mean over training batches logged since the previous record.
    """
    points, trained = [], []
    for record in read_log(run / "log.jsonl"):
        if record.get("kind") == "train":
            trained.append(record["top1"])
        elif record.get("kind") == "eval":
            mean = np.mean(trained, axis=0).tolist() if trained else []
            point = {"step": record["step"], "top1": record["top1"], "trained_top1": mean}
            points.append(point)
            trained = []
    return points


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and, of several, sample standard deviation: "2.31 ± 0.02"."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def family_table(
    runs: dict[str, list[Json]], speeds: dict[str, list[dict[str, float]]]
) -> str:
    """All runs as Markdown: tables of heads, of decoding per tree size, of speed.

    Args:
      runs: per drafter the results of `measure_one` for each seed.
      speeds: the results of `race`.
    """
    heads, decoded = [], []
    for name, found in runs.items():
        tops = [
            " ".join(f"{x:.3f}" for x in np.mean([f[top] for f in found], axis=0))
            for top in ("top1", "top5")
        ]
        size = f"{found[0]['parameters'] / 1e6:.2f} M"
        heads.append((name, size, *tops, spread([f["chain"] for f in found], 3)))
    for i in range(len(next(iter(runs.values()))[0]["decoded"])):
        for name, found in runs.items():
            rows = [f["decoded"][i] for f in found]
            keys = ("mean_accepted_length", "draft_share", "divergences", "prompts")
            values = {key: [r[key] for r in rows] for key in keys}
            decoded.append(
                (
                    name,
                    rows[0]["nodes"],
                    spread(values["mean_accepted_length"], 3),
                    f"{spread([100 * x for x in values['draft_share']], 1)}%",
                    f"{sum(values['divergences'])} of {sum(values['prompts'])}",
                )
            )
    raced = [
        (
            name,
            found[i]["nodes"],
            f"{found[i]['step_latency_ratio']:.2f}x",
            f"{found[i]['speedup']:.2f}x",
        )
        for i in range(len(next(iter(speeds.values()))))
        for name, found in speeds.items()
    ]
    tables = (
        (("drafter", "parameters", "top-1 by head", "top-5 by head",
          "a chain of first guesses"), heads),
        (("drafter", "nodes", "mean accepted length", "drafting, share of a step", "diverged"),
         decoded),
        (("drafter (first seed, interleaved)", "nodes", "step latency", "speed-up"), raced),
    )  # fmt: skip
    return "\n\n".join(markdown_table(header, rows) for header, rows in tables)


def convergence(curves: dict[str, list[list[Json]]]) -> str:
    """Top-1 accuracy over training as Markdown, means over heads and seeds; "" without curves.

    Columns: held-out accuracy at every evaluation, the gain since the previous one at the end (over the
    seeds), and the accuracy on the last training batches, with dropout if there is any. A gain near zero
    means that more steps with this schedule would not help.
    """
    curves = {name: [c for c in points if len(c) > 1] for name, points in curves.items()}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return ""
    steps = [record["step"] for record in next(iter(curves.values()))[0]]
    header = (
        "held-out top-1 at step",
        *steps,
        "gain since the previous one",
        "on training text",
    )
    cells = []
    for name, points in curves.items():
        top1 = [[statistics.mean(r["top1"]) for r in records] for records in points]
        gains = [row[-1] - row[-2] for row in top1]
        trained = [statistics.mean(records[-1]["trained_top1"]) for records in points]
        means = (f"{x:.3f}" for x in np.mean(top1, axis=0))
        cells.append((name, *means, spread(gains, 4), f"{statistics.mean(trained):.3f}"))
    return markdown_table(list(map(str, header)), cells)


def differences(
    runs: dict[str, list[Json]], first: str, second: str, i: int
) -> list[float]:
    """Difference in mean accepted length of the i-th tree, `second` minus `first`, per seed."""
    pairs = zip(runs[first], runs[second], strict=True)
    name = "mean_accepted_length"
    return [b["decoded"][i][name] - a["decoded"][i][name] for a, b in pairs]


def orders(runs: dict[str, list[Json]]) -> str:
    """Check the papers' orders of mean accepted length per tree size, as Markdown.

    A comparison holds or fails if all seeds agree, else it is undecided.
    """
    lines = []
    for order in ORDERS:
        for i in range(len(next(iter(runs.values()))[0]["decoded"])):
            for first, second in itertools.pairwise(name for name in order if name in runs):
                more = differences(runs, first, second, i)
                n_won = sum(d > 0 for d in more)
                verdict = {len(more): "holds", 0: "does not hold"}.get(n_won, "undecided")
                nodes = runs[first][0]["decoded"][i]["nodes"]
                lines.append(
                    f"- {first} < {second} with {nodes} nodes: {verdict}, {spread(more, 3)} in "
                    f"{len(more)} {'seed' if len(more) == 1 else 'seeds'}"
                )
    return "\n".join(lines)


def draw(
    runs: dict[str, list[Json]],
    speeds: dict[str, list[dict[str, float]]],
    curves: dict[str, list[list[Json]]],
    path: Path,
) -> Path:
    """Draw accuracy by head, speed-up over accepted length, and held-out accuracy over training.

    Accuracies are means over the seeds; lengths, speeds and curves are of the first seed.
    """
    accuracy, lengths, training = {}, {}, {}
    for name, figures in runs.items():
        top1 = np.mean([seed["top1"] for seed in figures], axis=0).tolist()
        accuracy[name] = (list(range(1, len(top1) + 1)), top1)
        accepted = [row["mean_accepted_length"] for row in figures[0]["decoded"]]
        lengths[name] = (accepted, [row["speedup"] for row in speeds[name]])
        records = curves[name][0] if curves.get(name) else []
        mean = [statistics.mean(record["top1"]) for record in records]
        training[name] = ([record["step"] for record in records], mean)
    charts = [
        Chart("top-1 accuracy", "head", accuracy),
        Chart("speed-up", "mean accepted length", lengths),
        Chart("held-out top-1, mean of the heads", "training step", training),
    ]
    return draw_lines(charts, path=path)
