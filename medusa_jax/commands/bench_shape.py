"""`bench --shape`: what a published shape costs on this device, without its weights."""

import argparse
from datetime import date
from pathlib import Path
from typing import Any

from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.whole_files import write_json, write_text


def add_shape(p: argparse.ArgumentParser) -> None:
    """--shape and --random_weights."""
    p.add_argument("--shape", help="instead: steps of a published shape (llama-7b, ...), or of a "
                   "config.json, with --random_weights; --drafters: all")  # fmt: skip
    p.add_argument("--random_weights", action="store_true",
                   help="for --shape: weights are random, made on the device")  # fmt: skip


def run_shape(flags: argparse.Namespace, out: Path) -> int:
    """Measure, print, write the file."""
    import jax

    from medusa_jax.api import default_dtype
    from medusa_jax.evaluate import by_shape
    from medusa_jax.heads import DRAFTERS
    from medusa_jax.interop.shapes import find_shape

    if not (flags.shape and flags.random_weights):
        raise UserError(
            "a shape has no weights of its own: give --shape and --random_weights together"
        )
    if flags.weights == "stored":
        raise UserError("a shape has no file whose weights could be read as stored")
    if flags.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    names = flags.drafters.split(",") if flags.drafters else list(DRAFTERS)
    dtype = flags.dtype or default_dtype()
    found = by_shape.measure(
        find_shape(flags.shape),
        names,
        dtype=dtype,
        weights=flags.weights,
        draft_weights=flags.draft_weights,
        rounds=flags.repeats,
    )
    device = jax.devices()[0]
    facts = {
        "date": date.today().isoformat(),
        "device": f"{device.platform}: {device.device_kind}",
        "shape": flags.shape,
        **found,
    }
    write_json(out / "bench.json", facts)
    text = shape_table(found)
    write_text(out / "bench.md", text + "\n")
    print(text)
    print(f"\n{plain_line(facts)}")
    inform(f"wrote {out}/bench.json and bench.md")
    return 0


def shape_table(found: dict[str, Any]) -> str:
    """The drafters of `evaluate.by_shape.measure` as Markdown."""
    largest = found["sizes"][-1]
    header = (
        "drafter", "heads, GB", *(f"{size} nodes" for size in found["sizes"]),
        f"step, {largest} nodes", "host time", "bytes read / needed",
    )  # fmt: skip
    cells = [
        (
            r["drafter"],
            f"{r['head_bytes'] / 1e9:.2f}",
            *(f"{ratio:.2f}x" for ratio in r["step_latency_ratios"]),
            f"{1e3 * r['step_seconds']:.2f} ms",
            f"{100 * r['host_share']:.0f}%",
            times(r["read_against_needed"]),
        )
        for r in found["drafters"]
    ]
    return markdown_table(header, cells)


def plain_line(facts: dict[str, Any]) -> str:
    """What is printed below the table."""
    plain, peak = facts["plain"], facts["peak_bytes"]
    speed = facts["read_bandwidth_bytes_per_second"]
    return (
        f"plain decoding: {1e3 * plain['step_seconds']:.2f} ms a token, which needs "
        f"{plain['bytes_needed'] / 1e9:.2f} GB: {100 * plain['bandwidth_share']:.0f}% of the "
        f"measured {speed / 1e9:.1f} GB/s; host time {100 * plain['host_share']:.0f}%; the "
        f"compiled step reads {times(plain['read_against_needed'])} what it needs (XLA's count)\n"
        f"peak memory: {'not told by this device' if peak is None else f'{peak / 2**30:.1f} GiB'}\n"
        "columns of nodes: latency of a step against a plain one in turn; trees: first nodes of "
        "the demo's Hydra growth order, four deep; host time: what a step takes longer when it is "
        "dispatched by itself\n"
        f"{facts['shape']} with random weights in {facts['weights']}, {facts['dtype']} "
        f"arithmetic, {facts['products']} products, batch 1 ({facts['device']}, {facts['date']})"
    )


def times(ratio: float | None) -> str:
    """A ratio; "-" where it is not known."""
    return "-" if ratio is None else f"{ratio:.2f}x"
