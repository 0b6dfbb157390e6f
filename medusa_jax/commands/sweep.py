"""`python -m medusa_jax sweep`: acceptance rules over their parameters.

Two sweeps on one question file. *Thresholds* (the Medusa paper's figure 5): typical acceptance at
one temperature, delta = sqrt(epsilon), against greedy and plain sampling: tokens per step, and
the mean log-probability that the backbone gives to what was written. *Temperatures*: tokens per
step of sampled, rejection and typical acceptance. `sampled` and `rejection` are lossless,
`typical` is lossy. Writes sweep.json and two pictures.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_jax.commands.flags import (
    GenerationFlags,
    ModelFlags,
    add_generation,
    add_limit,
    add_model,
    at_least,
    command,
    load_model,
    numbers,
    run_command,
)
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.evaluate.questions import DEMO_PROMPTS, prompt_of, read_questions
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.whole_files import write_json

EXAMPLES = """examples:
  python -m medusa_jax sweep
  python -m medusa_jax sweep --small
  python -m medusa_jax sweep --drafter medusa,hydrapp --tree 64
  python -m medusa_jax sweep --model path/to/model --drafter path/to/heads --tree 64 \\
      --prompts questions.jsonl --limit 64 --dtype bfloat16
"""
EPSILONS = tuple(round(0.01 * i, 2) for i in range(1, 26))
TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
RULES = ("sampled", "rejection", "typical")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(GenerationFlags, ModelFlags):
    """Flags of `sweep`."""

    prompts: str
    limit: int
    tree: str
    epsilons: str
    temperatures: str
    batch_size: int
    small: bool
    out: str


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax sweep",
        "Tokens per step and quality of acceptance rules over their parameters.",
        EXAMPLES,
    )
    p.add_argument("--prompts", default=str(DEMO_PROMPTS), help="questions, as for bench")
    add_limit(p, 32)
    add_model(p)
    p.add_argument("--tree", default="8", help="as for decode.py (default: 8 nodes)")
    add_generation(p, temperature=0.7)
    p.add_argument("--epsilons", default=",".join(map(str, EPSILONS)))
    p.add_argument("--temperatures", default=",".join(map(str, TEMPERATURES)))
    p.add_argument(
        "--batch_size", type=at_least(1), default=16, help="prompts decoded at a time"
    )
    p.add_argument(
        "--small", action="store_true", help="8 prompts, 60 tokens, every fifth epsilon"
    )
    p.add_argument("--out", default="work/sweep", help="directory for results")
    return p


def run(flags: Flags) -> int:
    """Both sweeps of every drafter, tables, pictures."""
    from medusa_jax.console import use_compilation_cache
    from medusa_jax.decoding.acceptance import RULES as ACCEPTANCE

    epsilons = numbers(flags.epsilons, "--epsilons", float)
    temperatures = numbers(flags.temperatures, "--temperatures", float)
    if flags.small:
        most = min(60, flags.max_new_tokens)
        flags = dataclasses.replace(flags, limit=8, max_new_tokens=most)
        epsilons = epsilons[::5]
    if flags.temperature <= 0:
        raise UserError("the threshold sweep needs --temperature above 0")
    use_compilation_cache()
    questions = read_questions(flags.prompts, flags.limit)
    batch = min(flags.batch_size, len(questions))
    swept = []
    for name in flags.drafter.split(",") if flags.drafter else [None]:
        model = load_model(flags, name, needs_heads=True, tree=flags.tree, batch=batch)
        label = name or model.drafter.heads.drafter
        swept.append(
            {"drafter": label} | sweep_one(flags, model, questions, epsilons, temperatures)
        )
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    facts = {
        "dtype": str(model.dtype),
        "prompts": len(questions),
        "max_new_tokens": flags.max_new_tokens,
        "guarantees": {name: rule.guarantee for name, rule in ACCEPTANCE.items()},
        "drafters": swept,
    }
    write_json(out / "sweep.json", facts)
    print(threshold_table(swept))
    print()
    print(temperature_table(swept))
    draw(swept, out)
    inform(f"wrote {out}/sweep.json, thresholds.png and temperatures.png")
    return 0


def sweep_one(
    flags: Flags,
    model: Any,
    questions: Sequence[dict[str, Any]],
    epsilons: Sequence[float],
    temperatures: Sequence[float],
) -> dict[str, Any]:
    """Both sweeps of one drafter with its tree."""
    from tqdm import tqdm

    from medusa_jax.api import Options
    from medusa_jax.evaluate.rules import measure_rule

    T = flags.temperature
    prompts = [model.encode(prompt_of(question)) for question in questions]
    plan: list[tuple[str, float, float, float]] = [
        ("greedy", 0.0, 0.09, 0.3),
        ("sampled", T, 0.09, 0.3),
        *(("typical", T, e, e**0.5) for e in epsilons),
    ]
    plan += [(rule, t, 0.09, 0.3) for rule in RULES for t in temperatures]
    rows = []
    with announced("compiling"):
        for rule, t, epsilon, delta in tqdm(plan, unit="run", disable=None):
            options = Options(
                flags.max_new_tokens, t, seed=flags.seed, epsilon=epsilon, delta=delta
            )
            rows.append(measure_rule(model, prompts, rule, options, flags.batch_size))
    greedy, plain, *rest = rows
    return {
        "tree_nodes": model.tree.n_nodes,
        "greedy": greedy,
        "plain_sampling": plain,
        "thresholds": rest[: len(epsilons)],
        "temperatures": rest[len(epsilons) :],
    }


def threshold_table(swept: Sequence[dict[str, Any]]) -> str:
    """Figure 5 as a Markdown table."""
    header = (
        "drafter",
        "acceptance",
        "epsilon",
        "delta",
        "mean accepted length",
        "mean log-probability",
    )
    cells = []
    for one in swept:
        for row in (one["greedy"], one["plain_sampling"], *one["thresholds"]):
            epsilon, delta = row["epsilon"], row["delta"]
            cells.append(
                (
                    one["drafter"],
                    f"{row['acceptance']}, T {row['temperature']:g}",
                    "-" if epsilon is None else f"{epsilon:.2f}",
                    "-" if delta is None else f"{delta:.2f}",
                    f"{row['mean_accepted_length']:.3f}",
                    f"{row['mean_log_probability']:.3f}",
                )
            )
    return markdown_table(header, cells)


def by_rule(one: dict[str, Any]) -> dict[str, dict[float, float]]:
    """Mean accepted length over temperature of every rule, by its name in tables and pictures."""
    found: dict[str, dict[float, float]] = {}
    for row in one["temperatures"]:
        lossy = " (lossy)" if row["acceptance"] == "typical" else ""
        label = f"{one['drafter']}, {row['acceptance']}{lossy}"
        found.setdefault(label, {})[row["temperature"]] = row["mean_accepted_length"]
    return found


def temperature_table(swept: Sequence[dict[str, Any]]) -> str:
    """Mean accepted length of every rule over temperature, as a Markdown table."""
    lines = {label: own for one in swept for label, own in by_rule(one).items()}
    temperatures = sorted({t for own in lines.values() for t in own})
    cells = [
        (label, *(f"{own[t]:.3f}" for t in temperatures)) for label, own in lines.items()
    ]
    header = ("mean accepted length at T", *(f"{t:g}" for t in temperatures))
    return markdown_table(header, cells)


def draw(swept: Sequence[dict[str, Any]], out: Path) -> None:
    """thresholds.png (Medusa's figure 5, with several drafters Hydra's figure 6) and temperatures.png."""
    from medusa_jax.plots import Chart, draw_lines

    charts = []
    for title, name in (
        ("mean accepted length", "mean_accepted_length"),
        ("mean log-probability of the text", "mean_log_probability"),
    ):
        lines, levels = {}, {}
        belongs: dict[str, str] = {}
        for one in swept:
            rows, plain = one["thresholds"], one["plain_sampling"]
            label = f"{one['drafter']}, typical (lossy)"
            lines[label] = ([r["epsilon"] for r in rows], [r[name] for r in rows])
            # The lossless rules write the same text with every drafter.
            own = name == "mean_accepted_length"
            whose = f"{one['drafter']}, " if own else ""
            for how, row in (
                ("greedy", one["greedy"]),
                (f"sampling, T {plain['temperature']:g}", plain),
            ):
                levels[f"{whose}{how}"] = row[name]
                belongs |= {f"{whose}{how}": label} if own else {}
        axis = "epsilon (delta = sqrt epsilon)"
        charts.append(Chart(title, axis, lines, levels, belongs=belongs))
    draw_lines(charts, path=out / "thresholds.png")
    over = {
        label: (list(own), list(own.values()))
        for one in swept
        for label, own in by_rule(one).items()
    }
    chart = Chart("mean accepted length", "temperature", over)
    draw_lines([chart], path=out / "temperatures.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), Flags, run, argv)


if __name__ == "__main__":
    sys.exit(main())
