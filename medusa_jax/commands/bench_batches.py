"""`bench batches`: decoding B rows at a time, drafted and plain, the tree fitted to each B."""

from dataclasses import dataclass

from medusa_jax.commands.bench_race import RaceFlags, names_of, out_directory
from medusa_jax.commands.flags import (
    Program,
    at_least,
    flag,
    generation_options,
    load_model,
    numbers,
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
    """Compare batch sizes."""

    sizes: tuple[int, ...] = flag("batch sizes", "1,2,4,8", type=numbers(least=1))
    most_nodes: int = flag("largest tree to try", 16, type=at_least(1))


def run(flags: Flags) -> int:
    """One table for every drafter."""
    from medusa_jax.evaluate.batches import batch_rows

    sizes, options = flags.sizes, generation_options(flags)
    questions, out = questions_of(flags, flags.model), out_directory(flags.out)
    for name in names_of(flags):
        model = load_model(flags, name)
        prompts = first_prompts(flags, model, questions, flags.max_new_tokens)
        rows = batch_rows(model, prompts, options, sizes, flags.repeats, flags.most_nodes)
        drafter = model.drafter.heads.drafter
        facts = {"drafter": drafter, "dtype": str(model.dtype), "rows": rows}
        facts |= device_facts()
        write_report(out, f"batches-{drafter}", facts, rows, COLUMNS, drafter)
    return 0


main = Program("python -m medusa_jax bench batches", Flags, run, EXAMPLES)
