"""What `python -m medusa_jax.bench` does with --batches and with --cache_check."""

import argparse
import json
from pathlib import Path
from typing import Any

from medusa_jax.bench import drafter_names, prompt_of
from medusa_jax.cli.flags import load_model, numbers
from medusa_jax.console import say
from medusa_jax.errors import UserError


def run_batches(
    flags: argparse.Namespace, questions: list[dict[str, Any]], out: Path
) -> int:
    """The table over batch sizes, once for every drafter."""
    from medusa_jax.api import Options
    from medusa_jax.decoding.throughput import batch_rows, batch_table

    batches = numbers(flags.batches, "--batches")
    if min(batches) < 1:
        raise UserError(f"--batches are at least 1, not {flags.batches!r}")
    options = Options(
        max_new_tokens=flags.max_new_tokens, temperature=flags.temperature, seed=flags.seed
    )
    for name in drafter_names(flags):
        model = load_model(flags, name)
        prompts = [model.encode(prompt_of(question)) for question in questions]
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
        (out / f"batches-{drafter}.json").write_text(json.dumps(facts, indent=1) + "\n")
        print(f"{drafter}\n\n{batch_table(rows)}\n")
    say(f"wrote {out}/batches-*.json")
    return 0


def run_cache_check(
    flags: argparse.Namespace, questions: list[dict[str, Any]], out: Path
) -> int:
    """What a step costs at 64 tokens of context, by the size the cache may come to have."""
    from medusa_jax.decoding.latency import cache_check

    model = load_model(flags, drafter_names(flags)[0])
    prompt = (model.encode(prompt_of(questions[0])) * 64)[:64]
    found = cache_check(model, prompt)
    (out / "cache_check.json").write_text(json.dumps(found, indent=1) + "\n")
    print("| slots | step | bytes of a step | step against 128 | bytes against 128 |")
    print("|---|---|---|---|---|")
    names = {
        "small": "128",
        "large": "4096, grown with the text (this engine)",
        "preallocated": "4096, preallocated (for contrast)",
    }
    small = found["small"]
    for case, row in found.items():
        print(
            f"| {names[case]} | {1e3 * row['seconds']:.3f} ms | {row['bytes'] / 1e6:.2f} MB "
            f"| {row['seconds'] / small['seconds']:.3f} | {row['bytes'] / small['bytes']:.3f} |"
        )
    say(f"wrote {out}/cache_check.json")
    return 0
