"""`bench batches`: decoding B rows at a time, drafted and plain, the tree fitted to each B."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from medusa_jax.commands.bench_race import RaceFlags, out_directory, race_parser
from medusa_jax.commands.flags import (
    at_least,
    generation_options,
    load_model,
    numbers,
    run_command,
)
from medusa_jax.commands.prompts import first_prompts, questions_of
from medusa_jax.evaluate.tables import Cell, device_facts, write_report

EXAMPLES = """examples:
  python -m medusa_jax bench batches --sizes 1,2,4,8 --limit 24 --max_new_tokens 128
"""
COLUMNS: dict[str, Cell] = {
    "batch": "{batch}",
    "tree nodes": "{tree_nodes}",
    "mean accepted length": "{mean_accepted_length:.2f}",
    "speed-up at equal batch": "{speedup:.2f}x",
    "tokens/s, all rows": "{tokens_per_second:.0f}",
    "autoregressive tokens/s": "{autoregressive_tokens_per_second:.0f}",
    "diverged": "{divergences} of {texts}",
}


@dataclass(frozen=True, kw_only=True)
class Flags(RaceFlags):
    """Flags of `bench batches`."""

    sizes: str
    most_nodes: int


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = race_parser("batches", "Compare batch sizes.", EXAMPLES, "the model's own heads")
    p.add_argument("--sizes", default="1,2,4,8", help="batch sizes (default: 1,2,4,8)")
    p.add_argument("--most_nodes", type=at_least(1), default=16,
                   help="largest tree to try (default: 16)")  # fmt: skip
    return p


def run(flags: Flags) -> int:
    """One table for every drafter."""
    from medusa_jax.api import default_drafter
    from medusa_jax.evaluate.batches import batch_rows

    sizes, options = numbers(flags.sizes, "--sizes", least=1), generation_options(flags)
    questions, out = questions_of(flags, flags.model), out_directory(flags.out)
    for name in (flags.drafters or default_drafter(flags.model)).split(","):
        model = load_model(flags, name)
        prompts = first_prompts(flags, model, questions, flags.max_new_tokens)
        rows = batch_rows(model, prompts, options, sizes, flags.repeats, flags.most_nodes)
        drafter = model.drafter.heads.drafter
        facts = device_facts() | {
            "drafter": drafter,
            "dtype": str(model.dtype),
            "rows": rows,
        }
        write_report(out, f"batches-{drafter}", facts, rows, COLUMNS, drafter)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), Flags, run, argv)
