"""`bench shape`: what a published shape costs on this device, with random weights."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_jax.commands.bench_race import out_directory
from medusa_jax.commands.flags import (
    DRAFT_WEIGHTS,
    DTYPES,
    WEIGHTS,
    at_least,
    command,
    run_command,
)
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import Cell, device_facts, write_report

EXAMPLES = """examples:
  python -m medusa_jax bench shape --shape llama-7b
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of `bench shape`."""

    shape: str
    drafters: str | None
    dtype: str | None
    weights: str | None
    draft_weights: str | None
    repeats: int
    out: str


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax bench shape",
        "Time steps of a published shape, or of a config.json, with random weights.",
        EXAMPLES,
    )
    p.add_argument("--shape", required=True, help="llama-7b, ..., or a directory")
    p.add_argument("--drafters", help="comma-separated names (default: all)")
    p.add_argument("--dtype", choices=DTYPES, help="default: float32 on CPU, else bfloat16")
    p.add_argument("--weights", choices=WEIGHTS, help="type to store kernels in")
    p.add_argument("--draft_weights", choices=DRAFT_WEIGHTS, help="that of draft heads")
    p.add_argument(
        "--repeats", type=at_least(1), default=3, help="timed rounds (default: 3)"
    )
    p.add_argument("--out", default="work/bench", help="directory for results")
    return p


def run(flags: Flags) -> int:
    """Measure, print, write the files."""
    import jax

    from medusa_jax.api import default_dtype
    from medusa_jax.evaluate import by_shape
    from medusa_jax.heads import DRAFTERS
    from medusa_jax.interop.shapes import find_shape

    out = out_directory(flags.out)
    if flags.weights == "stored":
        raise UserError("a shape has no file whose weights could be read as stored")
    if flags.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    found = by_shape.measure(
        find_shape(flags.shape),
        flags.drafters.split(",") if flags.drafters else list(DRAFTERS),
        dtype=flags.dtype or default_dtype(),
        weights=flags.weights,
        draft_weights=flags.draft_weights,
        rounds=flags.repeats,
    )
    facts = device_facts() | {"shape": flags.shape, **found}
    rows, sizes = found["drafters"], found["sizes"]
    columns: dict[str, Cell] = {
        "drafter": "{drafter}",
        "heads, GB": lambda r: f"{r['head_bytes'] / 1e9:.2f}",
        **{f"{n} nodes": f"{{step_latency_ratios[{i}]:.2f}}x" for i, n in enumerate(sizes)},
        f"step, {sizes[-1]} nodes": lambda r: f"{1e3 * r['step_seconds']:.2f} ms",
        "host time": "{host_share:.0%}",
        "bytes read / needed": "{read_against_needed:.2f}x",
    }
    write_report(out, "shape", facts, rows, columns, plain_line(facts))
    return 0


def plain_line(facts: Mapping[str, Any]) -> str:
    """What is printed below the table."""
    plain, peak, read = facts["plain"], facts["peak_bytes"], facts["plain"]["read_against_needed"]  # fmt: skip
    speed = facts["read_bandwidth_bytes_per_second"]
    return (
        f"plain decoding: {1e3 * plain['step_seconds']:.2f} ms a token, which needs "
        f"{plain['bytes_needed'] / 1e9:.2f} GB: {plain['bandwidth_share']:.0%} of the "
        f"measured {speed / 1e9:.1f} GB/s; host time {plain['host_share']:.0%}; the "
        f"compiled step reads {'-' if read is None else f'{read:.2f}x'} what it needs (XLA's count)\n"
        f"peak memory: {'not told by this device' if peak is None else f'{peak / 2**30:.1f} GiB'}\n"
        "columns of nodes: latency of a step against a plain one, interleaved; trees: first nodes of "
        "the demo's Hydra growth order, four deep; host time: what a step takes longer when it is "
        "dispatched by itself\n"
        f"{facts['shape']} with random weights in {facts['weights']}, {facts['dtype']} "
        f"arithmetic, {facts['products']} products, batch 1 ({facts['device']}, {facts['date']})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), Flags, run, argv)
