"""`python -m medusa_jax.bench`: drafters side by side on one question file.

For every drafter and tree: tokens per step, step latency against this engine's own
autoregressive loop, speed-up, divergences, and how much the text repeats itself (text that runs
in circles is easy to guess). All timings of a row come from one run, prompt by prompt in turn.
Writes a table, a JSON file of all figures and the answers in Spec-Bench's JSONL format.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.cli.flags import (
    add_base,
    add_generation,
    add_limit,
    command,
    load_model,
    run_command,
)
from medusa_jax.console import say
from medusa_jax.errors import UserError

DEMO_PROMPTS = Path(__file__).parent / "demo" / "prompts.jsonl"
EXAMPLES = """examples:
  python -m medusa_jax.bench
  python -m medusa_jax.bench --limit 8 --trees auto,8,64 --out work/bench
  python -m medusa_jax.bench --batches 1,2,4,6,8 --limit 24 --max_new_tokens 128
  python -m medusa_jax.bench --cache_check
  python -m medusa_jax.bench --model path/to/model --drafters path/to/heads,none \\
      --prompts question.jsonl --transformers
"""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax.bench",
        "Compare drafters and trees with the autoregressive loop.",
        EXAMPLES,
    )
    p.add_argument("--prompts", default=str(DEMO_PROMPTS),
                   help="JSONL: prompt/prompt_ids, or Spec-Bench questions with turns (first "
                   "turn); an optional 'continuation_ids' is the real text")  # fmt: skip
    add_limit(p, 50)
    p.add_argument("--model", help="directory or hub id of a model (default: the demo)")
    add_base(p)
    p.add_argument("--drafters", help="comma-separated names or directories (default: hydra for "
                   "the demo, none for another model)")  # fmt: skip
    p.add_argument("--trees", default="auto,64", help="comma-separated --tree values (cartesian "
                   "widths with x: cartesian:2x3)")  # fmt: skip
    add_generation(p)
    p.add_argument(
        "--repeats", type=int, default=3, help="timed runs per prompt; medians count"
    )
    p.add_argument(
        "--transformers",
        action="store_true",
        help="also time transformers' generate on the same weights (needs torch)",
    )
    p.add_argument("--batches", help="instead of the table of drafters: one of batch sizes, e.g. "
                   "1,2,4,6,8, with the tree fitted to each")  # fmt: skip
    p.add_argument("--most_nodes", type=int, default=16,
                   help="largest tree that --batches tries (default: 16)")  # fmt: skip
    p.add_argument(
        "--cache_check",
        action="store_true",
        help="instead: step time and bytes at 64 tokens of context, 4096 against 128 slots",
    )
    p.add_argument("--out", default="work/bench", help="directory for results")
    return p


def drafter_names(flags: argparse.Namespace) -> list[str]:
    """The drafters that --drafters names."""
    from medusa_jax.api import default_drafter

    names: str = flags.drafters or default_drafter(flags.model)
    return names.split(",")


def read_questions(path: str, limit: int) -> list[dict[str, Any]]:
    """Questions with `prompt`, an id and a category, from our JSONL or Spec-Bench's."""
    from medusa_jax.distill import read_prompts

    try:
        with open(path) as file:
            first = json.loads(file.readline() or "{}")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read the questions in {path}: {error}") from error
    if "turns" in first:
        with open(path) as file:
            records = [json.loads(line) for line in file if line.strip()][:limit]
        records = [r | {"prompt": r["turns"][0]} for r in records]
    else:
        records = read_prompts(path, limit)
    for i, record in enumerate(records):
        record.setdefault("question_id", i)
        record.setdefault("category", record.get("file", "all"))
    return records


def prompt_of(question: dict[str, Any]) -> str | list[int]:
    """A question's prompt, as ids where they are given."""
    prompt: str | list[int] = question.get("prompt_ids") or question["prompt"]
    return prompt


def bench_row(
    model: Any, questions: list[dict[str, Any]], tree: Any, flags: argparse.Namespace
) -> dict[str, Any]:
    """One line of the table: `model` with `tree` on all questions, against plain decoding."""
    from tqdm import tqdm

    from medusa_jax.api import Options
    from medusa_jax.decoding.compare import compare
    from medusa_jax.text_stats import mean_repeated_ngram_share

    options = Options(
        max_new_tokens=flags.max_new_tokens, temperature=flags.temperature, seed=flags.seed
    )
    compared = []
    for question in tqdm(
        questions, desc=f"{tree.n_nodes} nodes", unit="prompt", disable=None
    ):
        compared += compare(
            model, [prompt_of(question)], options, tree=tree, repeats=flags.repeats
        )
    steps = sum(c.drafted.steps for c in compared)
    appended = sum(c.drafted.new_tokens - 1 for c in compared)
    plain_tokens = sum(c.autoregressive.new_tokens - 1 for c in compared)
    seconds = sum(c.decode_seconds for c in compared)
    plain_seconds = sum(c.autoregressive_seconds for c in compared)
    plain_steps = sum(c.autoregressive.steps for c in compared)
    length = appended / max(1, steps)
    ratio = (seconds / max(1, steps)) / (plain_seconds / max(1, plain_steps))
    speedup = (plain_seconds / plain_tokens) / (seconds / appended)
    outputs = [c.drafted.token_ids for c in compared]
    real = [q["continuation_ids"] for q in questions if "continuation_ids" in q]
    pairs = list(zip(outputs, real))
    whole = [sum(r.prefill_seconds + r.decode_seconds for r in side) for side in (
        [c.autoregressive for c in compared], [c.drafted for c in compared]
    )]  # fmt: skip
    end_to_end = (whole[0] / plain_tokens) / (whole[1] / appended)
    histogram = np.sum([c.drafted.acceptance_histogram for c in compared], axis=0)
    return {
        "drafter": model.drafter.heads.drafter if tree.depth else "none",
        "tree_nodes": tree.n_nodes,
        "temperature": flags.temperature,
        "prompts": len(compared),
        "tokens": appended,
        "mean_accepted_length": length,
        "acceptance_histogram": histogram.tolist(),
        "step_latency_ratio": ratio,
        "speedup": speedup,
        "speedup_median_prompt": statistics.median(c.speedup for c in compared),
        # With prefill and all host work, single runs; against tokens per step / step latency.
        "end_to_end_speedup": end_to_end,
        "efficiency": end_to_end / (length / ratio),
        "tokens_per_second": appended / seconds,
        "autoregressive_tokens_per_second": plain_tokens / plain_seconds,
        "divergences": sum(not c.identical for c in compared),
        "divergence_gaps": [c.first_divergence for c in compared if c.first_divergence],
        "repeated_4grams": mean_repeated_ngram_share(outputs),
        "repeated_4grams_real": mean_repeated_ngram_share([r[: len(o)] for o, r in pairs])
        if pairs
        else None,
        "answers": [
            spec_bench_answer(question, c, f"{model.drafter.heads.drafter}-{tree.n_nodes}")
            for question, c in zip(questions, compared)
        ],
    }


def spec_bench_answer(question: dict[str, Any], compared: Any, name: str) -> dict[str, Any]:
    """One line of Spec-Bench's answer files."""
    result = compared.drafted
    accepted = [
        n + 1 for n, count in enumerate(result.acceptance_histogram) for _ in range(count)
    ]
    return {
        "question_id": question["question_id"],
        "category": question["category"],
        "model_id": name,
        "choices": [
            {
                "index": 0,
                "turns": [result.text],
                "decoding_steps": [result.steps],
                "new_tokens": [result.new_tokens],
                "wall_time": [compared.decode_seconds],
                "accept_lengths": accepted,
            }
        ],
        "tstamp": time.time(),
    }


def transformers_speed(
    path: str, model: Any, questions: list[dict[str, Any]], flags: argparse.Namespace
) -> dict[str, float]:
    """tokens/s of transformers' greedy generate and of our autoregressive loop, in turn."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UserError(
            "--transformers needs torch: pip install 'medusa-jax[torch]'"
        ) from error
    from medusa_jax.api import Options

    theirs_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    options = Options(max_new_tokens=flags.max_new_tokens)
    ratios, ours_speed, theirs_speed = [], [], []
    for question in questions[:16]:
        ids = model.encode(prompt_of(question))
        ours = model.generate([ids], options, tree="none")[0]
        speed = ours.new_tokens / (ours.prefill_seconds + ours.decode_seconds)
        start = time.perf_counter()
        with torch.inference_mode():
            out = theirs_model.generate(
                torch.tensor([ids]), max_new_tokens=flags.max_new_tokens, do_sample=False,
                pad_token_id=0, eos_token_id=list(model.eos_ids) or None,
            )  # fmt: skip
        peer = (out.shape[1] - len(ids)) / (time.perf_counter() - start)
        ratios.append(speed / peer)
        ours_speed.append(speed)
        theirs_speed.append(peer)
    return {
        "transformers_tokens_per_second": statistics.median(theirs_speed),
        "our_autoregressive_tokens_per_second": statistics.median(ours_speed),
        "ratio": statistics.median(ratios[1:] or ratios),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| drafter | nodes | T | mean accepted length | step latency | speed-up | with prefill | of ideal "
        "| tokens/s | diverged | repeated 4-grams (real text) |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        real = r["repeated_4grams_real"]
        lines.append(
            f"| {r['drafter']} | {r['tree_nodes']} | {r['temperature']:g} "
            f"| {r['mean_accepted_length']:.2f} | {r['step_latency_ratio']:.2f}x "
            f"| {r['speedup']:.2f}x | {r['end_to_end_speedup']:.2f}x | {r['efficiency']:.2f} | {r['tokens_per_second']:.0f} "
            f"| {r['divergences']} of {r['prompts']} | {r['repeated_4grams']:.2f} "
            f"({'-' if real is None else f'{real:.2f}'}) |"
        )
    return "\n".join(lines)


def run(flags: argparse.Namespace) -> int:
    """Run every drafter with every tree, print the table, write the files."""
    import jax

    from medusa_jax import bench_batches
    from medusa_jax.api import DEMO
    from medusa_jax.console import use_compilation_cache
    from medusa_jax.decoding.latency import bytes_per_token, read_bandwidth

    use_compilation_cache()
    questions = read_questions(flags.prompts, flags.limit)
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    if flags.cache_check:
        return bench_batches.run_cache_check(flags, questions, out)
    if flags.batches:
        return bench_batches.run_batches(flags, questions, out)
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for name in drafter_names(flags):
        model = load_model(flags, name)
        for spec in flags.trees.split(","):
            tree = model.parse_tree(spec.replace("x", ",") if ":" in spec else spec)
            row = bench_row(model, questions, tree, flags)
            with open(out / f"{row['drafter']}-{tree.n_nodes}.jsonl", "w") as file:
                file.writelines(json.dumps(a) + "\n" for a in row.pop("answers"))
            rows.append(row)
    if flags.transformers:
        path = flags.model or str(DEMO / "backbone")
        facts["transformers"] = transformers_speed(path, model, questions, flags)
    bandwidth = read_bandwidth()
    needed = bytes_per_token(model, 256)
    speed = max(r["autoregressive_tokens_per_second"] for r in rows)
    device = jax.devices()[0]
    facts |= {
        "date": date.today().isoformat(),
        "device": f"{device.platform}: {device.device_kind}",
        "dtype": str(model.dtype),
        "bytes_per_token": needed,
        "read_bandwidth_bytes_per_second": bandwidth,
        "autoregressive_bandwidth_share": needed * speed / bandwidth,
        "rows": rows,
    }
    (out / "bench.json").write_text(json.dumps(facts, indent=1) + "\n")
    text = table(rows)
    (out / "bench.md").write_text(text + "\n")
    print(text)
    print(
        f"\nautoregressive loop: {speed:.0f} tokens/s, {needed / 1e6:.1f} MB read per token, "
        f"{100 * facts['autoregressive_bandwidth_share']:.0f}% of the measured "
        f"{bandwidth / 1e9:.1f} GB/s ({facts['device']}, {facts['dtype']}, {facts['date']})"
    )
    if "transformers" in facts:
        t = facts["transformers"]
        print(
            f"transformers generate: {t['transformers_tokens_per_second']:.0f} tokens/s, this "
            f"autoregressive loop {t['our_autoregressive_tokens_per_second']:.0f} "
            f"(prefill included in both): {t['ratio']:.1f}x"
        )
    say(f"wrote {out}/bench.json, bench.md and the answers")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
