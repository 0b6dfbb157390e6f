"""The measured runs in words: tables, the papers' orders, Amphista's claim, curves."""

import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Orders that the papers report for the mean accepted length.
ORDERS = (("medusa", "hydra", "hydrapp"), ("medusa", "amphista", "amphista_alpha"))


def curve(run: Path) -> list[dict[str, Any]]:
    """Held-out records of a training, in order: step, top1 and trained_top1, both per head.

    The latter is the mean over what was logged of training batches since the record before.
    """
    file = run / "log.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found, trained = [], []
    for record in map(json.loads, lines):
        if record.get("kind") == "train":
            trained.append(record["top1"])
        elif record.get("kind") == "eval":
            mean = np.mean(trained, axis=0).tolist() if trained else []
            one = {"step": record["step"], "top1": record["top1"], "trained_top1": mean}
            found.append(one)
            trained = []
    return found


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and, of several, sample standard deviation: "2.31 ± 0.02"."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def table(
    runs: dict[str, list[dict[str, Any]]], speeds: dict[str, list[dict[str, float]]]
) -> str:
    """All runs as Markdown: tables of heads, of decoding per tree size, of speed.

    Args:
      runs: per drafter what `measure_one` found for each seed.
      speeds: what `race` found.
    """
    lines = [
        "| drafter | parameters | top-1 by head | top-5 by head |",
        "|---|---|---|---|",
    ]
    for name, found in runs.items():
        tops = [
            " ".join(f"{x:.3f}" for x in np.mean([f[top] for f in found], axis=0))
            for top in ("top1", "top5")
        ]
        lines.append(
            f"| {name} | {found[0]['parameters'] / 1e6:.2f} M | {tops[0]} | {tops[1]} |"
        )
    lines += [
        "",
        "| drafter | nodes | mean accepted length | drafting, share of a step | diverged |",
        "|---|---|---|---|---|",
    ]
    for i in range(len(next(iter(runs.values()))[0]["decoded"])):
        for name, found in runs.items():
            rows = [f["decoded"][i] for f in found]
            keys = ("mean_accepted_length", "draft_share", "divergences", "prompts")
            several = {key: [r[key] for r in rows] for key in keys}
            lines.append(
                f"| {name} | {rows[0]['nodes']} | {spread(several['mean_accepted_length'], 3)} "
                f"| {spread([100 * x for x in several['draft_share']], 1)}% "
                f"| {sum(several['divergences'])} of {sum(several['prompts'])} |"
            )
    lines += ["", "| drafter (first seed, all in turn) | nodes | step latency | speed-up |",
              "|---|---|---|---|"]  # fmt: skip
    for i in range(len(next(iter(speeds.values())))):
        lines += [
            f"| {name} | {found[i]['nodes']} | {found[i]['step_latency_ratio']:.2f}x "
            f"| {found[i]['speedup']:.2f}x |"
            for name, found in speeds.items()
        ]
    return "\n".join(lines)


def convergence(curves: dict[str, list[list[dict[str, Any]]]]) -> str:
    """Top-1 accuracy over training as Markdown, means of the heads and seeds; "" without curves.

    Beside the held-out accuracy at every evaluation: what the last stretch still gained (over the
    seeds), and the accuracy on training batches there. A flat end says that more steps at this
    schedule's rates bring nothing; equal accuracies on both texts, that nothing was learnt by heart.
    """
    curves = {name: [c for c in found if len(c) > 1] for name, found in curves.items()}
    curves = {name: found for name, found in curves.items() if found}
    if not curves:
        return ""
    steps = [record["step"] for record in next(iter(curves.values()))[0]]
    lines = [
        f"| held-out top-1 at step | {' | '.join(map(str, steps))} "
        "| gain since the one before | on training text |",
        "|---" * (len(steps) + 3) + "|",
    ]
    for name, found in curves.items():
        top1_SN = [[statistics.mean(r["top1"]) for r in records] for records in found]
        gains = [row[-1] - row[-2] for row in top1_SN]
        trained = [statistics.mean(records[-1]["trained_top1"]) for records in found]
        means = " | ".join(f"{x:.3f}" for x in np.mean(top1_SN, axis=0))
        lines.append(
            f"| {name} | {means} | {spread(gains, 4)} | {statistics.mean(trained):.3f} |"
        )
    return "\n".join(lines)


def orders(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Whether the mean accepted lengths stand in the papers' order, per tree size."""
    lines = []
    for order in ORDERS:
        names = [name for name in order if name in runs]
        for i in range(len(next(iter(runs.values()))[0]["decoded"])):
            lengths = [
                [f["decoded"][i]["mean_accepted_length"] for f in runs[name]]
                for name in names
            ]
            if len(names) < 2:
                continue
            means = [statistics.mean(x) for x in lengths]
            holds = all(a < b for a, b in itertools.pairwise(means))
            seeds = sum(all(a < b for a, b in itertools.pairwise(x)) for x in zip(*lengths))
            nodes = runs[names[0]][0]["decoded"][i]["nodes"]
            lines.append(
                f"{' < '.join(names)} with {nodes} nodes: {'holds' if holds else 'does not hold'} "
                f"for the means, and in {seeds} of {len(lengths[0])} seeds"
            )
    return "\n".join(lines)


def claim(
    runs: dict[str, list[dict[str, Any]]], speeds: dict[str, list[dict[str, float]]]
) -> str:
    """Amphista's central claim (its table 2): it accepts less than Hydra++ and is yet faster."""
    if not {"amphista", "hydrapp"} <= runs.keys():
        return ""
    lines = []
    for i, row in enumerate(runs["amphista"][0]["decoded"]):
        ours, theirs = (
            statistics.mean(f["decoded"][i]["mean_accepted_length"] for f in runs[name])
            for name in ("amphista", "hydrapp")
        )
        faster = speeds["amphista"][i]["speedup"] / speeds["hydrapp"][i]["speedup"]
        holds = "holds" if ours < theirs and faster > 1 else "does not hold"
        lines.append(
            f"amphista against hydrapp with {row['nodes']} nodes: {ours / theirs - 1:+.1%} in "
            f"accepted length, {faster - 1:+.1%} in speed: the claim {holds} here"
        )
    return "\n".join(lines)
