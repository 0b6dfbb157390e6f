"""The tables and pictures of appendix G."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_jax.devices.chips import CHIPS, Chip
from medusa_jax.evaluate.roofline.operators import Operator
from medusa_jax.evaluate.roofline.predict import Roofs, best
from medusa_jax.evaluate.tables import markdown_table

Rows = Sequence[dict[str, Any]]
# Tree sizes in the pictures: the range of the paper's figures.
DRAWN = (1, 2, 4, *range(8, 257, 8))


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


def size_table(rows: Rows, sizes: Sequence[int]) -> str:
    """Figure 21 as a table: some sizes and the best one."""
    top = best(rows)["nodes"]
    cells = [
        (
            f"**{r['nodes']}**" if r["nodes"] == top else r["nodes"],
            f"{r['acceleration']:.2f}",
            f"{1e6 * r['seconds']:.1f}",
            f"{r['step_latency_ratio']:.2f}x",
            f"{r['speedup']:.2f}x",
        )
        for r in rows
        if r["nodes"] in (*sizes, top)
    ]
    header = ("nodes", "tokens per step", "latency (us)", "step latency", "speed-up")
    return markdown_table(header, cells)


def best_table(what: str, found: Mapping[Any, Rows]) -> str:
    """The best size and the speed-up there and at 64 nodes, a row per setting."""
    cells = []
    for setting, rows in found.items():
        top, paper = best(rows), next(r for r in rows if r["nodes"] == 64)
        nodes = f"{top['nodes']}{' (the largest tried)' if top is rows[-1] else ''}"
        cells.append((setting, nodes, f"{top['speedup']:.2f}x", f"{paper['speedup']:.2f}x"))
    return markdown_table((what, "best nodes", "speed-up", "with 64 nodes"), cells)


def chip_table(rows_of: Callable[[Chip], Rows]) -> str:
    """`best_table` over all known chips, by title and ridge point."""
    found = {f"{c.title} (ridge {c.ridge:.0f})": rows_of(c) for c in CHIPS.values()}
    return best_table("chip", found)


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
