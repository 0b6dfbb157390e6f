"""`bench --questions`: a published question file, both turns, by category and overall."""

import argparse
import hashlib
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import medusa_jax
from medusa_jax.commands.flags import generation_options, load_model
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.evaluate import scores
from medusa_jax.evaluate.questions import (
    MT_BENCH,
    MT_BENCH_TEMPERATURES,
    prompt_of,
    read_questions,
    spread,
)
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.whole_files import write_json, write_text

VERSIONED = ("jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers")


def add_question_file(p: argparse.ArgumentParser) -> None:
    """--questions and how a model is asked them."""
    p.add_argument("--questions", metavar="FILE",
                   help="instead: a question file as published (Spec-Bench, MT-bench, AlpacaEval, "
                   "HumanEval, GSM8K, XSUM, CNN/DM), all turns; beside another table's flag that "
                   "table, of first turns")  # fmt: skip
    p.add_argument("--chat_template", default="auto",
                   help="for --questions: a shipped template, plain (none), or auto: the "
                   "tokenizer's own if it has one, else plain (default)")  # fmt: skip
    p.add_argument("--max_prompt_tokens", type=int, default=0,
                   help="for --questions: longer prompts are cut (default: 2048, or what the "
                   "context leaves beside the answer)")  # fmt: skip


def add_questions(p: argparse.ArgumentParser) -> None:
    """--questions and what belongs to it."""
    add_question_file(p)
    p.add_argument("--mt_bench_temperatures", action="store_true",
                   help="for --questions: MT-bench's categories at FastChat's temperatures (writing, "
                   "roleplay 0.7; stem, humanities 0.1; the others 0), the rest at --temperature")  # fmt: skip


def run_questions(flags: argparse.Namespace, names: Sequence[str], out: Path) -> int:
    """Answer the file with every drafter and tree, print the table, write the files."""
    import jax

    from medusa_jax.evaluate import answering
    from medusa_jax.evaluate.conversation import find_template

    questions = questions_of(flags)
    options = generation_options(flags)
    wanted = {scores.kind_of(question) for question in questions}
    if scores.ROUGE in wanted and not scores.has_rouge():
        inform("without ROUGE, which needs rouge-score: pip install 'medusa-jax[rouge]'")
    temperatures = MT_BENCH_TEMPERATURES if flags.mt_bench_temperatures else {}
    rows: list[dict[str, Any]] = []
    for name in names:
        model = load_model(flags, name)
        template = find_template(model, flags.chat_template)
        room = prompt_room(flags, model.config.max_position)
        for spec in flags.trees.split(","):
            tree = model.parse_tree(spec.replace("x", ",") if ":" in spec else spec)
            answered = answering.answer_all(
                model, questions, tree, options,
                repeats=flags.repeats, template=template, room=room, temperatures=temperatures,
            )  # fmt: skip
            drafter = model.drafts_by(tree)
            write_answers(answered, f"{drafter}-{tree.n_nodes}", out)
            found = answering.category_rows(model, answered, tree, flags.repeats)
            about = {"drafter": drafter, "heads": name, "tree_nodes": tree.n_nodes}
            rows += [about | {"template": template, "room": room} | row for row in found]
    device = jax.devices()[0]
    facts = {
        "date": date.today().isoformat(),
        "device": f"{device.platform}: {device.device_kind}",
        "devices": jax.device_count(),
        "dtype": str(model.dtype),
        "versions": {
            "python": platform.python_version(),
            "medusa-jax": medusa_jax.__version__,
            **{name: version(name) for name in VERSIONED},
        },
        "questions": flags.questions,
        "sha256": hashlib.sha256(Path(flags.questions).read_bytes()).hexdigest(),
        "options": {
            name: getattr(flags, name)
            for name in (
                "model",
                "limit",
                "max_new_tokens",
                "temperature",
                "seed",
                "repeats",
                "mt_bench_temperatures",
            )
        },
        "rows": rows,
    }
    write_json(out / "results.json", facts)
    text = question_table(rows)
    write_text(out / "results.md", text + "\n")
    draw(rows, out)
    print(text)
    print(f"\n{facts['device']}, {facts['dtype']}, jax {version('jax')}, {facts['date']}")
    inform(f"wrote {out}/results.json, results.md, categories.png and the answers")
    return 0


def questions_of(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """--limit of --questions, from all categories alike; else the first of --prompts."""
    if flags.questions:
        return spread(read_questions(flags.questions), flags.limit)
    return read_questions(flags.prompts, flags.limit)


def first_prompts(
    flags: argparse.Namespace, model: Any, questions: Sequence[dict[str, Any]]
) -> list[list[int]]:
    """Ids of what is asked first: --questions through the chat template, --prompts as they stand."""
    from medusa_jax.evaluate.conversation import find_template, turn_prompt

    if not flags.questions:
        return [model.encode(prompt_of(question)) for question in questions]
    template = find_template(model, flags.chat_template)
    room = prompt_room(flags, model.config.max_position)
    return [turn_prompt(model, q, [], template, room)[0] for q in questions]


def prompt_room(flags: argparse.Namespace, context: int) -> int:
    """Most tokens of a prompt: as asked for, or the papers' 2048 where the answer still fits.

    Raises:
      UserError: the answer takes the whole context.
    """
    from medusa_jax.evaluate.conversation import PAPER_ROOM

    if flags.max_prompt_tokens < 0:
        raise UserError("--max_prompt_tokens is 1 or more")
    left = context - flags.max_new_tokens
    if left < 1:
        raise UserError(
            f"--max_new_tokens {flags.max_new_tokens} leaves no room for a prompt in a context "
            f"of {context}"
        )
    return min(flags.max_prompt_tokens or PAPER_ROOM, left)


def write_answers(answered: Sequence[Any], name: str, out: Path) -> None:
    """Spec-Bench's files of both sides, and MT-bench's for its judges."""
    from medusa_jax.evaluate.answers import answer_line, judge_line, write_lines

    for model_id, plain in ((name, False), (f"{name}-vanilla", True)):
        lines = [answer_line(a.question, a.turns, model_id, plain=plain) for a in answered]
        write_lines(out / f"{model_id}.jsonl", lines)
        judged = [
            judge_line(line)
            for line in lines
            if line["category"] in MT_BENCH and len(line["choices"][0]["turns"]) == 2
        ]
        if judged:
            write_lines(out / "mt_bench" / "model_answer" / f"{model_id}.jsonl", judged)


def question_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `answering.category_rows` as Markdown; scores of plain decoding in brackets."""
    known = (scores.EXACT_MATCH, *scores.ROUGES)
    names = [name for name in known if any(name in r["scores"] for r in rows)]
    header = (
        "drafter", "nodes", "category", "questions", "mean accepted length", "step latency",
        "speed-up", "off length / latency", "off it, with a step timed apart", "speed-up by Spec-Bench",
        "diverged", "prompts cut", *names,
    )  # fmt: skip
    cells = [
        (
            r["drafter"],
            r["tree_nodes"],
            r["category"],
            r["questions"],
            f"{r['mean_accepted_length']:.2f}",
            f"{r['step_latency_ratio']:.2f}x",
            f"{r['speedup']:.2f}x",
            off(r["difference"]),
            off(r["difference_apart"]),
            f"{r['spec_bench_speedup']:.2f}x",
            f"{r['divergences']} of {r['turns']}",
            r["cut"],
            *(score_cell(name, r["scores"].get(name)) for name in names),
        )
        for r in rows
    ]
    return markdown_table(header, cells)


def off(share: float) -> str:
    """A difference in percent; one that rounds to nothing has no minus in front."""
    return f"{round(100 * share, 1) + 0.0:+.1f}%"


def score_cell(name: str, found: dict[str, float] | None) -> str:
    """ "12.34 (12.31)": of the drafted texts and of plain decoding's."""
    if found is None:
        return "-"
    scale = 1 if name in scores.ROUGES else 100
    return f"{scale * found['drafted']:.2f} ({scale * found['plain']:.2f})"


def draw(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """categories.png: accepted length and speed-up by category, for every drafter and tree."""
    from medusa_jax.plots import draw_bars

    charts: dict[str, dict[str, dict[str, float]]] = {}
    for title, field in (
        ("mean accepted length", "mean_accepted_length"),
        ("speed-up against plain decoding", "speedup"),
    ):
        series = charts.setdefault(title, {})
        for row in rows:
            label = f"{row['drafter']}, {row['tree_nodes']} nodes"
            series.setdefault(label, {})[row["category"]] = row[field]
    draw_bars(charts, path=out / "categories.png", level=1.0)
