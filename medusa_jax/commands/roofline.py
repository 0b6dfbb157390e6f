"""`python -m medusa_jax roofline`: appendix G of the Medusa paper as a tool.

From the shape of a model and the peaks of a chip: operational intensity and latency of every
matrix product of a step, and with a curve of tokens per step over tree sizes the speed-up that the
roofline allows, over tree size, batch and length. Kernels are taken as ideal, so the figures are
upper bounds. `--measure` times the products on this device, fits the same model to the timings
and predicts with that.
"""

import dataclasses
from datetime import date
from functools import partial
from pathlib import Path

from medusa_jax.commands.flags import Program, at_least, flag, numbers
from medusa_jax.config import DTYPES, LlamaConfig
from medusa_jax.console import inform
from medusa_jax.devices.chips import CHIPS, Chip, find_chip
from medusa_jax.evaluate.roofline import operators, predict, report
from medusa_jax.interop.shapes import SHAPES, find_shape
from medusa_jax.plots import can_draw
from medusa_jax.whole_files import Json, write_json

EXAMPLES = """examples:
  python -m medusa_jax roofline
  python -m medusa_jax roofline --chip tpu-v5e --shape llama3-8b --batch 8 --whole_step
  python -m medusa_jax roofline --chip h100 --shape path/to/model --curve path/to/heads/tree.json
  python -m medusa_jax roofline --shape llama-7b --measure
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
    measure: bool = flag("time the products on this device", False)
    measure_batches: tuple[int, ...] = flag("rows", "1,4,16", type=numbers(least=1))
    measure_lengths: tuple[int, ...] = flag(
        "cached tokens", "128,512,2048", type=numbers(least=1)
    )
    measure_trees: tuple[int, ...] = flag(
        "nodes", "4,16,32,64,80,128", type=numbers(least=1)
    )
    most_gflop: float = flag(
        "leave larger products out (default: 100 on a CPU, 20,000 elsewhere)", 0.0
    )
    most_gbyte: float = flag(
        "likewise, by bytes moved (default: 1 on a CPU, 8 elsewhere)", 0.0
    )
    dtype: str | None = flag(
        "of what is timed (default: float32 on CPU, bfloat16 elsewhere)",
        None,
        choices=DTYPES[1:],
    )
    rounds: int = flag("stretches a timing is the median of", 5, type=at_least(1))
    out: str = flag("directory for results", "work/roofline")


def run(flags: Flags) -> int:
    """Predict, measure if asked to, print the tables, write the files."""
    config, chip = find_shape(flags.shape), find_chip(flags.chip)
    batches = flags.batches
    lengths = flags.lengths
    curve = (
        predict.paper_acceleration
        if flags.curve == "paper"
        else predict.measured_acceleration(flags.curve)
    )

    def step(batch: int, length: int, size: int, queries: int) -> list[operators.Operator]:
        sizes = (config, batch, queries, length)
        if flags.whole_step:
            return operators.step_operators(*sizes, flags.heads, size)
        return operators.block_operators(*sizes, size)

    def rows(roofs: predict.Roofs, batch: int, length: int, size: int) -> report.Rows:
        nodes = range(1, flags.most_nodes + 1)
        return predict.speedups(roofs, partial(step, batch, length, size), curve, nodes)

    def predictions(title: str, roofs: predict.Roofs, size: int, out: Path) -> Json:
        one = rows(roofs, flags.batch, flags.length, size)
        by_batch = {b: rows(roofs, b, flags.length, size) for b in batches}
        by_length = {n: rows(roofs, flags.length_batch, n, size) for n in lengths}
        what = "a whole step" if flags.whole_step else "one block"
        title = f"{title}, {flags.shape}, {what}"
        products = step(flags.batch, flags.length, size, flags.nodes)
        print(
            f"## {title}: batch {flags.batch}, length {flags.length}, {flags.nodes} nodes\n"
        )
        print(report.operator_table(products, roofs), end="\n\n")
        print(report.size_table(one, SHOWN), end="\n\n")
        print(report.best_table(f"batch (length {flags.length})", by_batch), end="\n\n")
        print(report.best_table(f"length (batch {flags.length_batch})", by_length))
        if can_draw():
            report.draw_predictions(one, by_batch, by_length, out, title)
        return {
            "operators": [
                dataclasses.asdict(o) | {"intensity": o.intensity} for o in products
            ],
            "sizes": one,
            "batches": by_batch,
            "lengths": by_length,
        }

    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    facts: Json = {
        "date": date.today().isoformat(),
        "shape": flags.shape,
        "chip": flags.chip,
    }
    facts |= {"curve": flags.curve, "batch": flags.batch, "length": flags.length}
    facts["predicted"] = predictions(
        chip.title, predict.roofs_of(chip), operators.BF16, out
    )

    def on(other: Chip) -> report.Rows:
        return rows(predict.roofs_of(other), flags.batch, flags.length, operators.BF16)

    print(f"\n{report.chip_table(on)}")
    if flags.measure:
        measured, fits = measure(flags, config, out)
        roofs = {group: fit.roof for group, fit in fits.items()}
        size = measured["bytes_of_a_number"]
        predicted = predictions(measured["device"], roofs, size, out / "measured")
        facts["measured"] = measured | {"predicted": predicted}
    write_json(out / "roofline.json", facts)
    inform(f"wrote {out}/roofline.json and the pictures")
    return 0


def measure(
    flags: Flags, config: LlamaConfig, out: Path
) -> tuple[Json, dict[str, predict.Fit]]:
    """Time the products and fit: (what is to be kept, fits by group).

    Draws measured.png and prints the fits.
    """
    import jax

    from medusa_jax.evaluate.roofline import measure as measuring

    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    dtype = flags.dtype or ("float32" if on_cpu else "bfloat16")
    grid = [
        list(getattr(flags, name))
        for name in ("measure_batches", "measure_lengths", "measure_trees")
    ]
    records, left_out = measuring.measure(
        config,
        *grid,
        dtype=dtype,
        rounds=flags.rounds,
        most_flops=1e9 * (flags.most_gflop or (100 if on_cpu else 20_000)),
        most_bytes=1e9 * (flags.most_gbyte or (1 if on_cpu else 8)),
    )
    fits = measuring.fit_roofs(records)
    title = f"{device.device_kind}, {flags.shape}, {dtype}"
    if can_draw():
        report.draw_measured(records, fits, out / "measured.png", title)
    print(
        f"\n## {title}: {len(records)} timings, {left_out} points larger than the limits\n"
    )
    print(report.fit_table(fits), end="\n\n")
    kept = {
        "device": f"{device.platform}: {device.device_kind}",
        "dtype": dtype,
        "bytes_of_a_number": jax.numpy.dtype(dtype).itemsize,
        "jax": jax.__version__,
        "left_out": left_out,
        "timings": records,
        "fits": {group: dataclasses.asdict(fit) for group, fit in fits.items()},
    }
    return kept, fits


main = Program("python -m medusa_jax roofline", Flags, run, EXAMPLES)
