"""`python -m research sweep`: acceptance rules over their parameters.

Two sweeps on one question file. *Thresholds* (the Medusa paper's figure 5): typical acceptance at
one temperature, delta = sqrt(epsilon), against greedy and plain sampling: tokens per step, and
the mean log-probability that the backbone gives to what was written. *Temperatures*: tokens per
step of sampled, rejection and typical acceptance. `sampled` and `rejection` are lossless,
`typical` is lossy. Writes sweep.json and two pictures.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_jax.commands.flags import Program, at_least, flag, numbers
from medusa_jax.commands.model_flags import GenerationFlags, ModelFlags, load_model
from medusa_jax.console import announced, entries, inform
from medusa_jax.errors import UserError
from medusa_jax.evaluate.questions import DEMO_PROMPTS, prompt_of
from medusa_jax.evaluate.tables import Cell, markdown_table, table_of
from medusa_jax.whole_files import Json, write_json
from research.question_files import read_questions

if TYPE_CHECKING:
    from medusa_jax.api import Model

EXAMPLES = """examples:
  python -m research sweep
  python -m research sweep --drafter medusa,hydrapp --tree 64
  python -m research sweep --model path/to/model --drafter path/to/heads --tree 64 \\
      --prompts questions.jsonl --limit 64 --dtype bfloat16
"""
RULES = ("sampled", "rejection", "typical")
# Of the table of thresholds.
COLUMNS: dict[str, Cell] = {
    "drafter": "{drafter}",
    "acceptance": "{acceptance}, T {temperature:g}",
    "epsilon": "{epsilon:.2f}",
    "delta": "{delta:.2f}",
    "mean accepted length": "{mean_accepted_length:.3f}",
    "mean log-probability": "{mean_log_probability:.3f}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(GenerationFlags, ModelFlags):
    """Tokens per step and quality of acceptance rules over their parameters."""

    prompts: str = flag("questions, as for bench (default: the demo's)", str(DEMO_PROMPTS))
    limit: int = flag("most prompts to use; 0 is all", 32, type=at_least(0))
    tree: str = flag("as for decode.py", "8")
    temperature: float = 0.7
    epsilons: tuple[float, ...] = flag(
        "thresholds", ",".join(f"{0.01 * i:g}" for i in range(1, 26)), type=numbers(float)
    )
    temperatures: tuple[float, ...] = flag(
        "of the second sweep", "0,0.25,0.5,0.75,1,1.25,1.5", type=numbers(float)
    )
    batch_size: int = flag("prompts decoded at a time", 16, type=at_least(1))
    out: str = flag("directory for results", "work/sweep")


def run(flags: Flags) -> int:
    """Both sweeps of every drafter, tables, pictures."""
    from medusa_jax.console import use_compilation_cache
    from medusa_jax.decoding.acceptance import RULES as ACCEPTANCE
    from medusa_jax.decoding.acceptance import rule_named

    epsilons = flags.epsilons
    temperatures = flags.temperatures
    if flags.temperature <= 0:
        raise UserError("the threshold sweep needs --temperature above 0")
    use_compilation_cache()
    questions = read_questions(flags.prompts, flags.limit)
    batch = min(flags.batch_size, len(questions))
    swept = []
    for name in entries(flags.drafter or "") or (None,):
        model = load_model(flags, name, needs_heads=True, tree=flags.tree, batch=batch)
        label = {"drafter": name or model.drafter.heads.drafter}
        prompts = [model.encode(prompt_of(question)) for question in questions]
        swept.append(label | sweep_one(flags, model, prompts, epsilons, temperatures))
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    facts = {
        "dtype": str(model.dtype),
        "prompts": len(questions),
        "max_new_tokens": flags.max_new_tokens,
        "guarantees": {name: rule_named(name).guarantee for name in ACCEPTANCE},
        "drafters": swept,
    }
    write_json(out / "sweep.json", facts)
    rows = [
        {"drafter": one["drafter"]} | row
        for one in swept
        for row in (one["greedy"], one["plain_sampling"], *one["thresholds"])
    ]
    print(f"{table_of(rows, COLUMNS)}\n\n{temperature_table(swept)}")
    if importlib.util.find_spec("matplotlib"):
        draw(swept, out)
    inform(f"wrote {out}/sweep.json, thresholds.png and temperatures.png")
    return 0


def sweep_one(
    flags: Flags,
    model: "Model",
    prompts: Sequence[list[int]],
    epsilons: Sequence[float],
    temperatures: Sequence[float],
) -> Json:
    """Both sweeps of one drafter with its tree."""
    from tqdm import tqdm

    from medusa_jax.api import Options
    from research.rules import measure_rule

    plan: list[tuple[str, float, Json]] = [
        ("greedy", 0.0, {}),
        ("sampled", flags.temperature, {}),
        *(
            ("typical", flags.temperature, {"epsilon": e, "delta": e**0.5})
            for e in epsilons
        ),
        *((rule, t, {}) for rule in RULES for t in temperatures),
    ]
    rows = []
    with announced("compiling"):
        for rule, temperature, thresholds in tqdm(plan, unit="run", disable=None):
            options = Options(
                flags.max_new_tokens, temperature, seed=flags.seed, **thresholds
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


def by_rule(swept: Sequence[Json]) -> dict[str, dict[float, float]]:
    """Mean accepted length over temperature of every drafter and rule, by label."""
    found: dict[str, dict[float, float]] = {}
    for one in swept:
        for row in one["temperatures"]:
            lossy = " (lossy)" if row["acceptance"] == "typical" else ""
            line = found.setdefault(f"{one['drafter']}, {row['acceptance']}{lossy}", {})
            line[row["temperature"]] = row["mean_accepted_length"]
    return found


def temperature_table(swept: Sequence[Json]) -> str:
    """Mean accepted length of every rule over temperature, as a Markdown table."""
    lines = by_rule(swept)
    temperatures = list(next(iter(lines.values())))
    cells = [
        (label, *(f"{lengths[t]:.3f}" for t in temperatures))
        for label, lengths in lines.items()
    ]
    return markdown_table(
        ("mean accepted length at T", *(f"{t:g}" for t in temperatures)), cells
    )


def draw(swept: Sequence[Json], out: Path) -> None:
    """thresholds.png (Medusa's figure 5, with several drafters Hydra's figure 6) and temperatures.png."""
    from medusa_jax.plots import Chart, draw_lines

    charts = []
    for title, name in (
        ("mean accepted length", "mean_accepted_length"),
        ("mean log-probability of the text", "mean_log_probability"),
    ):
        lines, levels = {}, {}
        for one in swept:
            rows, plain = one["thresholds"], one["plain_sampling"]
            label = f"{one['drafter']}, typical (lossy)"
            lines[label] = ([r["epsilon"] for r in rows], [r[name] for r in rows])
            # The lossless rules write the same text with every drafter.
            by_drafter = name == "mean_accepted_length"
            prefix = f"{one['drafter']}, " if by_drafter else ""
            for how, row in (
                ("greedy", one["greedy"]),
                (f"sampling, T {plain['temperature']:g}", plain),
            ):
                levels[f"{prefix}{how}"] = row[name]
        axis = "epsilon (delta = sqrt epsilon)"
        charts.append(Chart(title, axis, lines, levels))
    draw_lines(charts, path=out / "thresholds.png")
    lengths = by_rule(swept).items()
    over = {label: (list(line), list(line.values())) for label, line in lengths}
    chart = Chart("mean accepted length", "temperature", over)
    draw_lines([chart], path=out / "temperatures.png")


main = Program("python -m research sweep", Flags, run, EXAMPLES)
