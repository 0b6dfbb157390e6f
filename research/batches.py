"""`python -m research batches`: decoding B rows at a time, drafted and plain, the tree fitted to each B."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from medusa_jax.api import Model, Options
from medusa_jax.commands.bench import RaceFlags, names_of, out_directory
from medusa_jax.commands.flags import (
    Program,
    at_least,
    flag,
    generation_options,
    load_model,
    numbers,
)
from medusa_jax.errors import UserError
from medusa_jax.evaluate.fitting import figures_of, rung_of, time_sizes
from medusa_jax.evaluate.race import Contender, Run, race
from medusa_jax.evaluate.tables import Cell, device_facts, write_report
from medusa_jax.tree.files import tree_of_size
from medusa_jax.tree.tree import Order, Tree
from medusa_jax.whole_files import Json
from research.asking import PromptFlags, first_prompts, questions_of

EXAMPLES = """examples:
  python -m research batches --sizes 1,2,4,8 --limit 24 --max_new_tokens 128
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
class Flags(PromptFlags, RaceFlags):
    """Compare batch sizes."""

    sizes: tuple[int, ...] = flag("batch sizes", "1,2,4,8", type=numbers(least=1))
    most_nodes: int = flag("largest tree to try", 16, type=at_least(1))


def run(flags: Flags) -> int:
    """One table for every drafter."""
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


def batch_rows(
    model: Model,
    prompts: Sequence[Sequence[int]],
    options: Options,
    batches: Sequence[int],
    repeats: int,
    most_nodes: int,
) -> list[Json]:
    """Speed of every batch size with its fitted tree, against plain decoding in equal batches.

    Prompts are cut to one length and end-of-text tokens are ignored, so all rows of a batch have the
    same length.

    Raises:
      UserError: the heads have no calibrated tree with evidence.
    """
    calibrated = model.calibrated or {}
    if not tokens_by_size(calibrated):
        raise UserError(
            "fitting the tree to a batch needs a calibrated tree with evidence next to the "
            "heads: run `python -m medusa_jax calibrate`"
        )
    options = replace(options, eos_ids=())
    length = min(map(len, prompts))
    prompts = [list(p[-length:]) for p in prompts]
    contenders: list[Contender] = []
    for batch in batches:
        fit = measure_rung(model, calibrated, batch, most_nodes)
        for tree in (Tree.none(), tree_of_size(calibrated, fit["nodes"])):
            decode = partial(in_batches, model, options, batch, tree)
            facts = {"batch": batch, "tree_nodes": tree.n_nodes, "fit": fit}
            against = len(contenders) // 2 * 2
            contenders.append(Contender(f"batch {batch}", decode, "", facts, against))
    return race(contenders, [prompts], repeats, warm_up=False)[1::2]


def in_batches(
    model: Model, options: Options, batch: int, tree: Tree, prompts: Sequence[list[int]]
) -> Run:
    """All prompts, `batch` at a time, as one run; the last batch is filled up from the start.

    Example: 5 prompts, 2 at a time: [0, 1], [2, 3], [4, 0].
    """
    n, results, seconds = len(prompts), [], [0.0, 0.0]
    for at in range(0, n, batch):
        rows = [i % n for i in range(at, at + batch)]
        found = model.generate([prompts[i] for i in rows], options, rows, tree=tree)
        seconds[0] += found[0].prefill_seconds
        seconds[1] += found[0].decode_seconds
        results += found
    prefill, decode = seconds
    return replace(Run.of(results), prefill_seconds=prefill, decode_seconds=decode)


def tokens_by_size(calibrated: Json) -> dict[int, float]:
    """Tokens per step by number of nodes, from a tree file's evidence; {} without any."""
    rows = (calibrated.get("evidence") or {}).get("ladder") or []
    return {row["nodes"]: row["tokens_per_step"] for row in rows}


def measure_rung(model: Model, calibrated: Json, rows: int, most_nodes: int) -> Json:
    """Time the sizes of a tree file's evidence, up to `most_nodes`, for a batch size."""
    tokens = {n: t for n, t in tokens_by_size(calibrated).items() if n <= most_nodes}
    order = Order(calibrated["growth"], calibrated.get("spares") or ())
    return rung_of(
        rows, figures_of(time_sizes(model, order, tokens, [1] * 16, rows), tokens)
    )


main = Program("python -m research batches", Flags, run, EXAMPLES)
