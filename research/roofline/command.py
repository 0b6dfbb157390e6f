"""`python -m research roofline`: the best size of a tree, and the speed-up, that the hardware allows.

From the shape of a model, the peaks of a chip and tokens per step over the tree's size (Medusa,
appendix G). Kernels are taken as ideal, so the figures are upper bounds.
"""

import dataclasses
import json
from collections.abc import Sequence
from functools import partial

from medusa_jax.commands.flags import CommandLine, at_least, flag, numbers
from medusa_jax.devices.chips import CHIPS, Chip
from medusa_jax.errors import one_of
from medusa_jax.evaluate.tables import Cell, table_of
from research.roofline import model as roofline
from research.shapes import SHAPES, find_shape

EXAMPLES = """examples:
  python -m research roofline
  python -m research roofline --chip tpu-v5e --shape llama3-8b --batch 8 --whole_step
  python -m research roofline --chip h100 --shape path/to/model --curve path/to/heads/tree.json
"""
SHOWN = (1, 8, 16, 32, 48, 64, 80, 96, 128, 192, 256, 512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Speed-up over the size of the tree that the roofline allows, and the best size on each chip."""

    chip: str = flag(f"one of {', '.join(CHIPS)}", "a100")
    shape: str = flag(f"{', '.join(SHAPES)}, or a config.json or its directory", "llama-7b")
    batch: int = flag("rows", 1, type=at_least(1))
    batches: tuple[int, ...] = flag(
        "rows of the table of best sizes (figure 22)", "1,8,16,32,64", type=numbers(least=1)
    )
    length: int = flag("cached tokens", 1024, type=at_least(1))
    most_nodes: int = flag("largest tree to predict", 512, type=at_least(64, most=4096))
    curve: str = flag(
        "tokens per step over nodes: the paper's fit, or a tree file that calibrate wrote",
        "paper",
    )
    whole_step: bool = flag(
        "all layers, the LM head and the draft heads, not one block", False
    )
    heads: int = flag("Medusa heads of a whole step", 4, type=at_least(0))
    json: bool = flag("print one JSON object", False)


def step_of(flags: Flags, batch: int, length: int, queries: int) -> list[roofline.Operator]:
    """The products of a step, or of one block."""
    sizes = (find_shape(flags.shape), batch, queries, length)
    if flags.whole_step:
        return roofline.step_operators(*sizes, flags.heads)
    return roofline.block_operators(*sizes)


def predict(flags: Flags, chip: Chip, batch: int, length: int) -> list[roofline.Prediction]:
    """`roofline.speedups` of all trees up to --most_nodes."""
    curve = roofline.acceleration_of(flags.curve)
    step = partial(step_of, flags, batch, length)
    return roofline.speedups(chip, step, curve, range(1, flags.most_nodes + 1))


def size_table(rows: Sequence[roofline.Prediction]) -> str:
    """Figure 21 as a table: some sizes and the best one."""
    top = roofline.best(rows)["nodes"]
    columns: dict[str, Cell] = {
        "nodes": lambda r: f"**{top}**" if r["nodes"] == top else str(r["nodes"]),
        "tokens per step": "{acceleration:.2f}",
        "latency (us)": lambda r: f"{1e6 * r['seconds']:.1f}",
        "step latency": "{step_latency_ratio:.2f}x",
        "speed-up": "{speedup:.2f}x",
    }
    return table_of([r for r in rows if r["nodes"] in (*SHOWN, top)], columns)


def best_row(name: str, rows: Sequence[roofline.Prediction]) -> dict[str, object]:
    """The best size, its speed-up, and the speed-up of the paper's 64 nodes."""
    top = roofline.best(rows)
    return {
        "name": name,
        "nodes": top["nodes"],
        "speedup": top["speedup"],
        "speedup_64": rows[63]["speedup"],
    }


def best_table(what: str, rows: Sequence[dict[str, object]]) -> str:
    """A table of `best_row`, its first column called `what`."""
    columns: dict[str, Cell] = {
        what: "{name}",
        "best nodes": "{nodes}",
        "speed-up": "{speedup:.2f}x",
        "with 64 nodes": "{speedup_64:.2f}x",
    }
    return table_of(rows, columns)


def run(flags: Flags) -> int:
    one_of("a chip", flags.chip, CHIPS)
    chip = CHIPS[flags.chip]
    rows = predict(flags, chip, flags.batch, flags.length)
    if flags.json:
        print(json.dumps(dataclasses.asdict(flags) | {"sizes": rows}))
        return 0
    subject = "a whole step" if flags.whole_step else "one block"
    print(
        f"## {chip.title}, {flags.shape}, {subject}: batch {flags.batch}, length {flags.length}\n"
    )
    print(size_table(rows), end="\n\n")
    by_batch = [
        best_row(str(batch), predict(flags, chip, batch, flags.length))
        for batch in flags.batches
    ]
    print(best_table("batch", by_batch), end="\n\n")
    by_chip = [
        best_row(
            f"{other.title} (ridge {other.ridge:.0f})",
            predict(flags, other, flags.batch, flags.length),
        )
        for other in CHIPS.values()
    ]
    print(best_table("chip", by_chip))
    return 0


main = CommandLine("python -m research roofline", Flags, run, EXAMPLES)
