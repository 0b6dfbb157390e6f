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
    """Held-out records of a training, in order: step, top1 per head."""
    file = run / "log.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines]
    return [
        {"step": r["step"], "top1": r["top1"]} for r in records if r.get("kind") == "eval"
    ]


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
