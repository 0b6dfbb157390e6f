"""`python -m medusa_jax roofline`: the best size of a tree, and the speed-up, that the hardware allows.

From the shape of a model, the peaks of a chip and tokens per step over the tree's size (Medusa,
appendix G). Kernels are taken as ideal, so the figures are upper bounds. `python -m research roofline`
lists all products, draws the paper's figures and fits the same model to products timed on this device.
"""

import dataclasses
import json
from collections.abc import Sequence
from functools import partial

from medusa_jax.commands.flags import Program, at_least, flag
from medusa_jax.devices.chips import CHIPS, find_chip
from medusa_jax.evaluate import roofline
from medusa_jax.evaluate.tables import Cell, table_of
from medusa_jax.files.shapes import SHAPES, find_shape

EXAMPLES = """examples:
  python -m medusa_jax roofline
  python -m medusa_jax roofline --chip tpu-v5e --shape llama3-8b --batch 8 --whole_step
  python -m medusa_jax roofline --chip h100 --shape path/to/model --curve path/to/heads/tree.json
"""
SHOWN = (1, 8, 16, 32, 48, 64, 80, 96, 128, 192, 256, 512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Speed-up over the size of the tree that the roofline allows, and the best size on each chip."""

    chip: str = flag(f"one of {', '.join(CHIPS)}", "a100")
    shape: str = flag(f"{', '.join(SHAPES)}, or a config.json or its directory", "llama-7b")
    batch: int = flag("rows", 1, type=at_least(1))
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


def step_of(
    flags: Flags, batch: int, length: int, queries: int, size: int = roofline.BF16
) -> list[roofline.Operator]:
    """The products of a step, or of one block; `size` is the bytes of a number."""
    sizes = (find_shape(flags.shape), batch, queries, length)
    if flags.whole_step:
        return roofline.step_operators(*sizes, flags.heads, size)
    return roofline.block_operators(*sizes, size)


def predict(
    flags: Flags, roofs: roofline.Roofs, batch: int, length: int, size: int = roofline.BF16
) -> list[roofline.Prediction]:
    """`roofline.speedups` of all trees up to --most_nodes."""
    curve = roofline.acceleration_of(flags.curve)
    step = partial(step_of, flags, batch, length, size=size)
    return roofline.speedups(roofs, step, curve, range(1, flags.most_nodes + 1))


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


def run(flags: Flags) -> int:
    """Predict and print."""
    chip = find_chip(flags.chip)
    rows = predict(flags, roofline.roofs_of(chip), flags.batch, flags.length)
    if flags.json:
        print(json.dumps(dataclasses.asdict(flags) | {"sizes": rows}))
        return 0
    what = "a whole step" if flags.whole_step else "one block"
    print(
        f"## {chip.title}, {flags.shape}, {what}: batch {flags.batch}, length {flags.length}\n"
    )
    print(size_table(rows), end="\n\n")
    found = []
    for each in CHIPS.values():
        own = predict(flags, roofline.roofs_of(each), flags.batch, flags.length)
        name = f"{each.title} (ridge {each.ridge:.0f})"
        found.append({"chip": name} | roofline.best(own) | {"paper": own[63]["speedup"]})
    columns = {
        "chip": "{chip}", "best nodes": "{nodes}", "speed-up": "{speedup:.2f}x",
        "with 64 nodes": "{paper:.2f}x",
    }  # fmt: skip
    print(table_of(found, columns))
    return 0


main = Program("python -m medusa_jax roofline", Flags, run, EXAMPLES)
