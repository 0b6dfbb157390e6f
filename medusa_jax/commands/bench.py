"""`python -m medusa_jax bench`: drafters side by side on one question file.

For every drafter and tree: tokens per step, step latency against this engine's own
autoregressive loop, speed-up, divergences, and how much the text repeats itself (text that runs
in circles is easy to guess). All timings of a row come from one run, prompt by prompt in turn.
Writes a table, a JSON file of all figures and the answers in Spec-Bench's JSONL format.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from medusa_jax.commands.bench_against import add_against, run_against
from medusa_jax.commands.bench_in_turn import add_in_turn, run_in_turn
from medusa_jax.commands.bench_questions import (
    add_questions,
    first_prompts,
    questions_of,
    run_questions,
)
from medusa_jax.commands.bench_shape import add_shape, run_shape
from medusa_jax.commands.flags import (
    add_base,
    add_generation,
    add_limit,
    at_least,
    command,
    generation_options,
    load_model,
    numbers,
    run_command,
)
from medusa_jax.console import inform
from medusa_jax.evaluate.questions import DEMO_PROMPTS
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.whole_files import write_json, write_text

EXAMPLES = """examples:
  python -m medusa_jax bench
  python -m medusa_jax bench --limit 8 --trees auto,8,64 --out work/bench
  python -m medusa_jax bench --batches 1,2,4,6,8 --limit 24 --max_new_tokens 128
  python -m medusa_jax bench --cache_check
  python -m medusa_jax bench --in_turn --drafters medusa@8,hydra@8,prompt_lookup@chain:3 --limit 16
  python -m medusa_jax bench --ladder 8 --drafters medusa,hydra --limit 16
  python -m medusa_jax bench --in_turn --model smollm2 --questions mt_bench.jsonl --limit 16
  python -m medusa_jax bench --shape llama-7b --random_weights
  python -m medusa_jax bench --questions question.jsonl --limit 0 --max_new_tokens 1024
  python -m medusa_jax bench --model path/to/model --drafters path/to/heads,none \\
      --prompts question.jsonl
  python -m medusa_jax bench --model smollm2 --against transformers,llama.cpp --limit 16 \\
      --max_new_tokens 64
"""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax bench",
        "Compare drafters and trees with the autoregressive loop.",
        EXAMPLES,
    )
    p.add_argument("--prompts", default=str(DEMO_PROMPTS),
                   help="JSONL: prompt/prompt_ids, or Spec-Bench questions with turns (first "
                   "turn); an optional 'continuation_ids' is the real text")  # fmt: skip
    add_limit(p, 50)
    p.add_argument(
        "--model",
        help="directory, .gguf file, hub id or name of a model (default: the demo)",
    )
    add_base(p)
    p.add_argument("--drafters", help="comma-separated names or directories (default: hydra for "
                   "the demo, none for another model)")  # fmt: skip
    p.add_argument("--trees", default="auto,64", help="comma-separated --tree values (cartesian "
                   "widths with x: cartesian:2x3)")  # fmt: skip
    add_generation(p)
    p.add_argument(
        "--repeats",
        type=at_least(1),
        default=3,
        help="timed runs per prompt; medians count",
    )
    p.add_argument("--batches", help="instead of the table of drafters: one of batch sizes, e.g. "
                   "1,2,4,6,8, with the tree fitted to each")  # fmt: skip
    p.add_argument("--most_nodes", type=at_least(1), default=16,
                   help="largest tree that --batches tries (default: 16)")  # fmt: skip
    p.add_argument(
        "--cache_check",
        action="store_true",
        help="instead: step time and bytes at 64 tokens of context, 4096 against 128 slots",
    )
    add_against(p)
    add_in_turn(p)
    add_shape(p)
    add_questions(p)
    p.add_argument("--out", default="work/bench", help="directory for results")
    return p


def drafter_names(flags: argparse.Namespace) -> list[str]:
    """The drafters that --drafters names."""
    from medusa_jax.api import default_drafter

    names: str = flags.drafters or default_drafter(flags.model)
    return names.split(",")


def drafting_table(rows: list[dict[str, Any]]) -> str:
    """The rows of `evaluate.speed.drafting_row` as Markdown."""
    header = (
        "drafter", "nodes", "T", "mean accepted length", "step latency", "speed-up",
        "with prefill", "of ideal", "tokens/s", "diverged", "repeated 4-grams (real text)",
    )  # fmt: skip
    cells = []
    for r in rows:
        real = r["repeated_4grams_real"]
        cells.append(
            (
                r["drafter"],
                r["tree_nodes"],
                f"{r['temperature']:g}",
                f"{r['mean_accepted_length']:.2f}",
                f"{r['step_latency_ratio']:.2f}x",
                f"{r['speedup']:.2f}x",
                f"{r['end_to_end_speedup']:.2f}x",
                f"{r['efficiency']:.2f}",
                f"{r['tokens_per_second']:.0f}",
                f"{r['divergences']} of {r['prompts']}",
                f"{r['repeated_4grams']:.2f} ({'-' if real is None else f'{real:.2f}'})",
            )
        )
    return markdown_table(header, cells)


def other_table(flags: argparse.Namespace) -> bool:
    """Whether a table is asked for of which --questions gives the prompts only."""
    return bool(
        flags.cache_check or flags.batches or flags.in_turn or flags.ladder or flags.against
    )


def run(flags: argparse.Namespace) -> int:
    """Run every drafter with every tree, print the table, write the files."""
    import jax

    from medusa_jax.console import use_compilation_cache
    from medusa_jax.evaluate.answers import write_lines
    from medusa_jax.evaluate.bandwidth import bytes_per_token, read_bandwidth
    from medusa_jax.evaluate.speed import drafting_row

    use_compilation_cache()
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    if flags.shape or flags.random_weights:
        return run_shape(flags, out)
    if flags.questions and not other_table(flags):
        return run_questions(flags, drafter_names(flags), out)
    questions = questions_of(flags)
    if flags.model and not flags.questions and flags.prompts == str(DEMO_PROMPTS):
        # Their ids are of the demo's vocabulary, their texts are anybody's.
        questions = [
            {name: value for name, value in question.items() if not name.endswith("_ids")}
            for question in questions
        ]
    if flags.cache_check:
        return run_cache_check(flags, questions, out)
    if flags.batches:
        return run_batches(flags, questions, out)
    if flags.in_turn or flags.ladder:
        return run_in_turn(flags, questions, out)
    if flags.against:
        return run_against(flags, drafter_names(flags), questions, out)
    options = generation_options(flags)
    rows: list[dict[str, Any]] = []
    for name in drafter_names(flags):
        model = load_model(flags, name)
        for spec in flags.trees.split(","):
            tree = model.parse_tree(spec.replace("x", ",") if ":" in spec else spec)
            row = drafting_row(model, questions, tree, options, flags.repeats)
            write_lines(out / f"{row['drafter']}-{tree.n_nodes}.jsonl", row.pop("answers"))
            rows.append(row)
    needed = bytes_per_token(model, 256)
    bandwidth = read_bandwidth(needed)
    speed = max(r["autoregressive_tokens_per_second"] for r in rows)
    device = jax.devices()[0]
    facts: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": f"{device.platform}: {device.device_kind}",
        "dtype": str(model.dtype),
        "bytes_per_token": needed,
        "read_bandwidth_bytes_per_second": bandwidth,
        "autoregressive_bandwidth_share": needed * speed / bandwidth,
        "rows": rows,
    }
    write_json(out / "bench.json", facts)
    text = drafting_table(rows)
    write_text(out / "bench.md", text + "\n")
    print(text)
    print(
        f"\nautoregressive loop: {speed:.0f} tokens/s, {needed / 1e6:.1f} MB read per token, "
        f"{100 * facts['autoregressive_bandwidth_share']:.0f}% of the {bandwidth / 1e9:.1f} GB/s at "
        f"which so many bytes can be read here ({facts['device']}, {facts['dtype']}, {facts['date']})"
    )
    inform(f"wrote {out}/bench.json, bench.md and the answers")
    return 0


def run_batches(
    flags: argparse.Namespace, questions: list[dict[str, Any]], out: Path
) -> int:
    """The table over batch sizes, once for every drafter."""
    from medusa_jax.evaluate.batches import batch_rows

    batches = numbers(flags.batches, "--batches", least=1)
    options = generation_options(flags)
    for name in drafter_names(flags):
        model = load_model(flags, name)
        prompts = first_prompts(flags, model, questions)
        rows = batch_rows(
            model,
            prompts,
            options,
            batches,
            repeats=flags.repeats,
            most_nodes=flags.most_nodes,
        )
        drafter = model.drafter.heads.drafter
        facts = {"drafter": drafter, "dtype": str(model.dtype), "rows": rows}
        write_json(out / f"batches-{drafter}.json", facts)
        print(f"{drafter}\n\n{batch_table(rows)}\n")
    inform(f"wrote {out}/batches-*.json")
    return 0


def run_cache_check(
    flags: argparse.Namespace, questions: list[dict[str, Any]], out: Path
) -> int:
    """What a step costs at 64 tokens of context, by the size the cache may come to have."""
    from medusa_jax.evaluate.latency import cache_check

    model = load_model(flags, drafter_names(flags)[0])
    prompt = (first_prompts(flags, model, questions)[0] * 64)[:64]
    found = cache_check(model, prompt)
    write_json(out / "cache_check.json", found)
    names = {
        "small": "128",
        "large": "4096, grown with the text (this engine)",
        "preallocated": "4096, preallocated (for contrast)",
    }
    small = found["small"]
    header = ("slots", "step", "bytes of a step", "step against 128", "bytes against 128")
    cells = [
        (
            names[case],
            f"{1e3 * row['seconds']:.3f} ms",
            f"{row['bytes'] / 1e6:.2f} MB",
            f"{row['seconds'] / small['seconds']:.3f}",
            f"{row['bytes'] / small['bytes']:.3f}",
        )
        for case, row in found.items()
    ]
    print(markdown_table(header, cells))
    inform(f"wrote {out}/cache_check.json")
    return 0


def batch_table(rows: list[dict[str, Any]]) -> str:
    """The rows of `evaluate.batches.batch_rows` as Markdown."""
    header = (
        "batch", "tree nodes", "mean accepted length", "speed-up at equal batch",
        "tokens/s, all rows", "autoregressive tokens/s", "tokens/s against the first row",
        "diverged",
    )  # fmt: skip
    cells = [
        (
            r["batch"],
            r["tree_nodes"],
            f"{r['mean_accepted_length']:.2f}",
            f"{r['speedup']:.2f}x",
            f"{r['tokens_per_second']:.0f}",
            f"{r['autoregressive_tokens_per_second']:.0f}",
            f"{r['against_first_batch']:.2f}x",
            f"{r['divergences']} of {r['texts']}",
        )
        for r in rows
    ]
    return markdown_table(header, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
