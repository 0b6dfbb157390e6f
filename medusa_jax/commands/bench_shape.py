"""`bench shape`: what a published shape costs on this device, with random weights."""

from dataclasses import dataclass

from medusa_jax.commands.bench_race import out_directory
from medusa_jax.commands.flags import (
    DRAFT_WEIGHTS,
    DTYPES,
    WEIGHTS,
    Program,
    at_least,
    flag,
)
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import Cell, Row, device_facts, write_report

EXAMPLES = """examples:
  python -m medusa_jax bench shape --shape llama-7b
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Time steps of a published shape, or of a config.json, with random weights."""

    shape: str = flag("llama-7b, ..., or a directory")
    drafters: str | None = flag("comma-separated names (default: all)", None)
    dtype: str | None = flag("default: float32 on CPU, else bfloat16", None, choices=DTYPES)
    weights: str | None = flag("type to store kernels in", None, choices=WEIGHTS)
    draft_weights: str | None = flag("that of draft heads", None, choices=DRAFT_WEIGHTS)
    repeats: int = flag("timed rounds", 3, type=at_least(1))
    out: str = flag("directory for results", "work/bench")


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
    }
    write_report(out, "shape", facts, rows, columns, plain_line(facts))
    return 0


def plain_line(facts: Row) -> str:
    """What is printed below the table."""
    plain, speed = facts["plain"], facts["read_bandwidth_bytes_per_second"]
    return (
        f"plain decoding: {1e3 * plain['step_seconds']:.2f} ms a token, which needs "
        f"{plain['bytes_needed'] / 1e9:.2f} GB: {plain['bandwidth_share']:.0%} of the "
        f"measured {speed / 1e9:.1f} GB/s\n"
        "columns of nodes: latency of a step against a plain one, interleaved; trees: first nodes of "
        "the demo's Hydra growth order, four deep\n"
        f"{facts['shape']} with random weights in {facts['weights']}, {facts['dtype']} "
        f"arithmetic, {facts['products']} products, batch 1 ({facts['device']}, {facts['date']})"
    )


main = Program("python -m medusa_jax bench shape", Flags, run, EXAMPLES)
