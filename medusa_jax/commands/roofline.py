"""`python -m medusa_jax roofline`: appendix G of the Medusa paper as a tool.

From the shape of a model and the peaks of a chip: operational intensity and latency of every
matrix product of a step, and with a curve of tokens per step over tree sizes the speed-up that the
roofline allows, over tree size, batch and length. Kernels are taken as ideal, so the figures are
upper bounds. `python -m research roofline` fits the same model to products timed on this device.
"""

import dataclasses
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

from medusa_jax.commands.flags import Program, at_least, flag, numbers
from medusa_jax.console import inform
from medusa_jax.devices.chips import CHIPS, find_chip
from medusa_jax.evaluate.roofline import operators, predict, report
from medusa_jax.interop.shapes import SHAPES, find_shape
from medusa_jax.plots import can_draw
from medusa_jax.whole_files import Json, write_json

EXAMPLES = """examples:
  python -m medusa_jax roofline
  python -m medusa_jax roofline --chip tpu-v5e --shape llama3-8b --batch 8 --whole_step
  python -m medusa_jax roofline --chip h100 --shape path/to/model --curve path/to/heads/tree.json
"""
SHOWN = (1, 8, 16, 32, 48, 64, 80, 96, 128, 192, 256, 512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Latency, tokens per step and speed-up that the roofline predicts.

    The defaults are those of the paper's figures 21 to 23.
    """

    chip: str = flag(f"one of {', '.join(CHIPS)}", "a100")
    shape: str = flag(f"{', '.join(SHAPES)}, or a config.json or its directory", "llama-7b")
    batch: int = flag("rows (figure 21)", 1, type=at_least(1))
    length: int = flag("cached tokens", 1024, type=at_least(1))
    nodes: int = flag("size of the tree whose products are listed", 64, type=at_least(1))
    most_nodes: int = flag("largest tree to predict", 512, type=at_least(64))
    batches: tuple[int, ...] = flag(
        "rows (figure 22)", "1,2,4,8,16,32,64", type=numbers(least=1)
    )
    lengths: tuple[int, ...] = flag(
        "cached tokens (figure 23)", "128,512,1024,2048,4096,8192", type=numbers(least=1)
    )
    length_batch: int = flag("rows of figure 23", 4, type=at_least(1))
    curve: str = flag(
        "tokens per step over nodes: the paper's fit, or a tree file that calibrate wrote",
        "paper",
    )
    whole_step: bool = flag(
        "all layers, the LM head and the draft heads, not one block", False
    )
    heads: int = flag("Medusa heads of a whole step", 4, type=at_least(0))
    out: str = flag("directory for results", "work/roofline")


def run(flags: Flags) -> int:
    """Predict, print the tables, write the files."""
    chip, out = find_chip(flags.chip), Path(flags.out)
    predict_rows = predictor(flags)
    out.mkdir(parents=True, exist_ok=True)
    predicted = predictions(flags, chip.title, predict.roofs_of(chip), out)
    print(
        f"\n{report.chip_table(lambda c: predict_rows(predict.roofs_of(c), flags.batch, flags.length))}"
    )
    facts = {
        "date": date.today().isoformat(),
        "shape": flags.shape,
        "chip": flags.chip,
        "curve": flags.curve,
        "batch": flags.batch,
        "length": flags.length,
        "predicted": predicted,
    }
    write_json(out / "roofline.json", facts)
    inform(f"wrote {out}/roofline.json and the pictures")
    return 0


def step_of(
    flags: Flags, size: int = operators.BF16
) -> Callable[[int, int, int], list[operators.Operator]]:
    """(rows, cached tokens, query tokens) -> the products of a step, or of one block.

    Args:
      size: bytes of a number.
    """
    config = find_shape(flags.shape)

    def step(batch: int, length: int, queries: int) -> list[operators.Operator]:
        sizes = (config, batch, queries, length)
        if flags.whole_step:
            return operators.step_operators(*sizes, flags.heads, size)
        return operators.block_operators(*sizes, size)

    return step


def predictor(
    flags: Flags, size: int = operators.BF16
) -> Callable[[predict.Roofs, int, int], report.Rows]:
    """(roofs, rows, cached tokens) -> `predict.speedups` up to --most_nodes; `size` as for `step_of`."""
    step, nodes = step_of(flags, size), range(1, flags.most_nodes + 1)
    curve = (
        predict.paper_acceleration
        if flags.curve == "paper"
        else predict.measured_acceleration(flags.curve)
    )
    return lambda roofs, batch, length: predict.speedups(
        roofs, partial(step, batch, length), curve, nodes
    )


def predictions(
    flags: Flags, title: str, roofs: predict.Roofs, out: Path, size: int = operators.BF16
) -> Json:
    """Print the tables, draw the pictures into `out` and return all figures; `size` as for `step_of`."""
    batches = flags.batches
    lengths = flags.lengths
    rows = predictor(flags, size)
    one = rows(roofs, flags.batch, flags.length)
    by_batch = {b: rows(roofs, b, flags.length) for b in batches}
    by_length = {n: rows(roofs, flags.length_batch, n) for n in lengths}
    what = "a whole step" if flags.whole_step else "one block"
    title = f"{title}, {flags.shape}, {what}"
    products = step_of(flags, size)(flags.batch, flags.length, flags.nodes)
    print(f"## {title}: batch {flags.batch}, length {flags.length}, {flags.nodes} nodes\n")
    print(report.operator_table(products, roofs), end="\n\n")
    print(report.size_table(one, SHOWN), end="\n\n")
    print(report.best_table(f"batch (length {flags.length})", by_batch), end="\n\n")
    print(report.best_table(f"length (batch {flags.length_batch})", by_length))
    if can_draw():
        report.draw_predictions(one, by_batch, by_length, out, title)
    return {
        "operators": [dataclasses.asdict(o) | {"intensity": o.intensity} for o in products],
        "sizes": one,
        "batches": by_batch,
        "lengths": by_length,
    }


main = Program("python -m medusa_jax roofline", Flags, run, EXAMPLES)
