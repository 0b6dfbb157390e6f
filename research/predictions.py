"""The tables and pictures of appendix G (Medusa): all products, speed-ups over batch and length."""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_jax.commands import roofline
from medusa_jax.commands.flags import at_least, flag, numbers
from medusa_jax.evaluate.roofline import BF16, Operator, Prediction, Roofs, best
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.whole_files import Json

Rows = Sequence[Prediction]
# Tree sizes in the pictures: the range of the paper's figures.
DRAWN = (1, 2, 4, *range(8, 257, 8))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(roofline.Flags):
    """Settings of the paper's figures 21 to 23."""

    nodes: int = flag("size of the tree whose products are listed", 64, type=at_least(1))
    batches: tuple[int, ...] = flag(
        "rows (figure 22)", "1,2,4,8,16,32,64", type=numbers(least=1)
    )
    lengths: tuple[int, ...] = flag(
        "cached tokens (figure 23)", "128,512,1024,2048,4096,8192", type=numbers(least=1)
    )
    length_batch: int = flag("rows of figure 23", 4, type=at_least(1))
    out: str = flag("directory for results", "work/roofline")


def predictions(
    given: Flags, title: str, roofs: Roofs, out: Path, size: int = BF16
) -> Json:
    """Print the tables, draw the pictures into `out` and return all figures.

    Args:
      size: bytes of a number.
    """

    def rows(batch: int, length: int) -> Rows:
        return roofline.predict(given, roofs, batch, length, size)

    one = rows(given.batch, given.length)
    by_batch = {b: rows(b, given.length) for b in given.batches}
    by_length = {n: rows(given.length_batch, n) for n in given.lengths}
    what = "a whole step" if given.whole_step else "one block"
    title = f"{title}, {given.shape}, {what}"
    products = roofline.step_of(given, given.batch, given.length, given.nodes, size)
    print(f"## {title}: batch {given.batch}, length {given.length}, {given.nodes} nodes\n")
    print(operator_table(products, roofs), end="\n\n")
    print(roofline.size_table(one), end="\n\n")
    print(best_table(f"batch (length {given.length})", by_batch), end="\n\n")
    print(best_table(f"length (batch {given.length_batch})", by_length))
    if importlib.util.find_spec("matplotlib"):
        draw_predictions(one, by_batch, by_length, out, title)
    return {
        "operators": [dataclasses.asdict(o) | {"intensity": o.intensity} for o in products],
        "sizes": one,
        "batches": by_batch,
        "lengths": by_length,
    }


def operator_table(operators: Sequence[Operator], roofs: Roofs) -> str:
    """Each product with its intensity, its latency and what bounds it."""
    cells = []
    for o in operators:
        roof = roofs[o.group]
        bound = "arithmetic" if o.intensity > roof.flops / roof.bandwidth else "memory"
        cells.append(
            (
                o.name,
                o.group,
                o.calls,
                f"{o.flops / 1e9:.3f}",
                f"{o.bytes / 1e6:.2f}",
                f"{o.intensity:.2f}",
                f"{1e6 * roof.seconds(o):.1f}",
                bound,
            )
        )
    header = (
        "operator", "group", "calls", "GFLOP a call", "MB a call", "FLOPs per byte",
        "latency of all calls (us)", "bound by",
    )  # fmt: skip
    return markdown_table(header, cells)


def best_table(what: str, found: Mapping[Any, Rows]) -> str:
    """The best size and the speed-up there and at 64 nodes, a row per setting."""
    cells = []
    for setting, rows in found.items():
        top, paper = best(rows), next(r for r in rows if r["nodes"] == 64)
        nodes = f"{top['nodes']}{' (the largest tried)' if top is rows[-1] else ''}"
        cells.append((setting, nodes, f"{top['speedup']:.2f}x", f"{paper['speedup']:.2f}x"))
    return markdown_table((what, "best nodes", "speed-up", "with 64 nodes"), cells)


def draw_predictions(
    one: Rows,
    batches: Mapping[int, Rows],
    lengths: Mapping[int, Rows],
    out: Path,
    title: str,
) -> None:
    """acceleration.png, batches.png and lengths.png: figures 21, 22 and 23."""
    from medusa_jax.plots import Chart, draw_lines

    def line(rows: Rows, name: str) -> tuple[list[float], list[float]]:
        drawn = [r for r in rows if r["nodes"] in DRAWN]
        return [r["nodes"] for r in drawn], [r[name] for r in drawn]

    xlabel = "tokens in a step (root included)"
    lines = {"tokens per step": line(one, "acceleration"), "speed-up": line(one, "speedup")}
    draw_lines(
        [Chart("acceleration and speed-up", xlabel, lines)],
        path=out / "acceleration.png",
        title=title,
    )
    for what, found in (("batch", batches), ("length", lengths)):
        series = {f"{what} {n}": line(rows, "speedup") for n, rows in found.items()}
        chart = Chart("speed-up", xlabel, series, {"plain decoding": 1.0})
        name = "batches.png" if what == "batch" else "lengths.png"
        draw_lines([chart], path=out / name, title=title)
