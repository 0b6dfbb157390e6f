"""`bench questions`: a published question file, all turns, by category and overall.

Writes a table, a JSON file of all figures and the answers in Spec-Bench's JSONL format.
"""

import argparse
import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import medusa_jax
from medusa_jax.commands.bench_race import (
    TITLES,
    RaceFlags,
    add_trees,
    draw,
    out_directory,
    race_parser,
    tree_specs,
)
from medusa_jax.commands.flags import generation_options, load_model, run_command
from medusa_jax.commands.prompts import prompt_room, questions_of
from medusa_jax.console import inform
from medusa_jax.evaluate import scores
from medusa_jax.evaluate.questions import MT_BENCH, MT_BENCH_TEMPERATURES
from medusa_jax.evaluate.tables import Cell, device_facts, write_report

VERSIONED = ("jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers")
EXAMPLES = """examples:
  python -m medusa_jax bench questions --questions question.jsonl --limit 0 --max_new_tokens 1024
  python -m medusa_jax bench questions --model smollm2 --drafters hydrapp --trees 8 \\
      --questions mt_bench.jsonl --limit 16
"""
COLUMNS: dict[str, Cell] = {
    "drafter": "{drafter}",
    "nodes": "{tree_nodes}",
    "category": "{category}",
    "questions": "{questions}",
    "mean accepted length": "{mean_accepted_length:.2f}",
    "step latency": "{step_latency_ratio:.2f}x",
    "speed-up": "{speedup:.2f}x",
    "off length / latency": "{difference:+z.1%}",
    "off it, step timed in isolation": "{difference_apart:+z.1%}",
    "speed-up by Spec-Bench": "{spec_bench_speedup:.2f}x",
    "diverged": "{divergences} of {turns}",
    "prompts cut": "{cut}",
}


@dataclass(frozen=True, kw_only=True)
class Flags(RaceFlags):
    """Flags of `bench questions`."""

    trees: str
    mt_bench_temperatures: bool


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = race_parser(
        "questions", "Answer a question file.", EXAMPLES, "the model's own heads"
    )
    add_trees(p)
    p.add_argument("--mt_bench_temperatures", action="store_true",
                   help="MT-bench's categories at FastChat's temperatures (writing, roleplay 0.7; "
                   "stem, humanities 0.1; the others 0), the rest at --temperature")  # fmt: skip
    return p


def run(flags: Flags) -> int:
    """Answer the file with every drafter and tree, print the table, write the files."""
    import jax

    from medusa_jax.api import default_drafter
    from medusa_jax.evaluate import answering
    from medusa_jax.evaluate.conversation import find_template

    questions = questions_of(flags, flags.model)
    out, options = out_directory(flags.out), generation_options(flags)
    wanted = {scores.kind_of(question) for question in questions}
    if scores.ROUGE in wanted and not scores.has_rouge():
        inform("without ROUGE, which needs rouge-score: pip install 'medusa-jax[rouge]'")
    temperatures = MT_BENCH_TEMPERATURES if flags.mt_bench_temperatures else {}
    rows: list[dict[str, Any]] = []
    for name in (flags.drafters or default_drafter(flags.model)).split(","):
        model = load_model(flags, name)
        template = find_template(model, flags.chat_template)
        room = prompt_room(flags, model.config.max_position, flags.max_new_tokens)
        for tree in map(model.parse_tree, tree_specs(flags.trees)):
            answered = answering.answer_all(
                model, questions, tree, options,
                repeats=flags.repeats, template=template, room=room, temperatures=temperatures,
            )  # fmt: skip
            drafter = model.drafts_by(tree)
            write_answers(answered, f"{drafter}-{tree.n_nodes}", out)
            rows += [
                {"drafter": drafter, "tree_nodes": tree.n_nodes} | row
                for row in answering.category_rows(model, answered, tree, flags.repeats)
            ]
    file = flags.questions or flags.prompts
    facts = device_facts() | {
        "devices": jax.device_count(),
        "dtype": str(model.dtype),
        "versions": {
            "python": platform.python_version(),
            "medusa-jax": medusa_jax.__version__,
            **{name: version(name) for name in VERSIONED},
        },
        "questions": file,
        "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest(),
        "options": asdict(flags),
        "rows": rows,
    }
    notes = f"{facts['device']}, {facts['dtype']}, jax {version('jax')}, {facts['date']}"
    write_report(out, "results", facts, rows, COLUMNS | score_columns(rows), notes)
    titles = {name: title for name, title in TITLES.items() if name != "step_latency_ratio"}
    series = "{drafter}, {tree_nodes} nodes"
    draw(rows, out / "categories.png", titles, series, "{category}")
    return 0


def write_answers(answered: Sequence[Any], name: str, out: Path) -> None:
    """Spec-Bench's files of both sides, and MT-bench's for its judges."""
    from medusa_jax.evaluate.answers import answer_line, judge_line, write_lines

    for model_id, plain in ((name, False), (f"{name}-vanilla", True)):
        lines = [
            answer_line(a.question, a.compared, model_id, plain=plain) for a in answered
        ]
        write_lines(out / f"{model_id}.jsonl", lines)
        judged = [
            judge_line(line)
            for line in lines
            if line["category"] in MT_BENCH and len(line["choices"][0]["turns"]) == 2
        ]
        if judged:
            write_lines(out / "mt_bench" / "model_answer" / f"{model_id}.jsonl", judged)


def score_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Cell]:
    """A column per score that any row has: "12.34 (12.31)", plain decoding's in brackets."""

    def cell(name: str) -> Cell:
        def text(row: Mapping[str, Any]) -> str:
            scale, found = 1 if name in scores.ROUGES else 100, row["scores"][name]
            return f"{scale * found['drafted']:.2f} ({scale * found['plain']:.2f})"

        return text

    known = (scores.EXACT_MATCH, *scores.ROUGES)
    return {name: cell(name) for name in known if any(name in r["scores"] for r in rows)}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), Flags, run, argv)
