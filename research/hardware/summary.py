"""The figures of all parts as one Markdown page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from medusa_jax.evaluate.tables import Cell, markdown_table, table_of
from medusa_jax.whole_files import Json, write_text
from research.hardware.record import read_rows

# What a row is about -> (title, columns).
TABLES: Mapping[str, tuple[str, Mapping[str, Cell]]] = {
    "bandwidth": ("Memory", {"what": "{of}", "GB/s": "{gb_per_second:.0f}"}),
    "product": (
        "Products of square matrices",
        {"type": "{kind}", "TFLOP/s": "{tflops:.1f}"},
    ),
    "rows": (
        "Products of few rows with 4096 x 22016 kernels in bfloat16, in one program",
        {"rows": "{rows}", "GB/s": "{gb_per_second:.0f}", "us each": "{microseconds:.1f}"},
    ),
    "exact": (
        "Drafted texts that equal plain decoding's, and rows alone that equal those of a batch; tiny random models",
        {
            "drafter": "{drafter}",
            "type": "{kind}",
            "sampling": "{sampling}",
            "compared": "{of}",
            "equal": "{equal} of {texts}",
            "steps": lambda r: "{} and {}".format(*r["steps"]),
        },
    ),
    "step": (
        "Decode steps of llama-7b in bfloat16, random weights, 800 tokens in the cache",
        {
            "batch": "{batch}",
            "drafter": "{drafter}",
            "nodes": "{nodes}",
            "ms": "{ms:.2f}",
            "of a plain step": "{ratio:.2f}x",
            "of the bandwidth": "{share_of_bandwidth:.0%}",
            "compile, s": "{compile_seconds:.1f}",
        },
    ),
    "loop": (
        "The loop of decoding, which ends by what was written",
        {
            "drafter": "{drafter}",
            "nodes": "{nodes}",
            "ms a step": "{ms:.2f}",
            "the call returns after": "{returned_after_share:.0%}",
        },
    ),
    "kernels": (
        "Kernels of a step in the compiled program (as `compile` counts them)",
        {
            "drafter": "{drafter}",
            "nodes": "{nodes}",
            "kernels": "{kernels:.0f}",
            "GB read": "{gb_read:.2f}",
        },
    ),
    "profile": (
        "Kernels of a step in a profile",
        {
            "drafter": "{drafter}",
            "nodes": "{nodes}",
            "kernels": "{kernels:.0f}",
            "busy, ms": "{busy_ms:.2f}",
        },
    ),
    "training": (
        "Training steps of heads on 7B",
        {
            "recipe": "{config}",
            "rows": "{rows} x {seq_len}",
            "s": "{seconds:.3f}",
            "tokens/s": "{tokens_per_second:.0f}",
            "stored, GB": lambda r: f"{r['argument_bytes'] / 1e9:.1f}",
            "compiler, GB": lambda r: f"{r['total_bytes'] / 1e9:.1f}",
            "device's peak, GB": lambda r: f"{r['device_bytes'] / 1e9:.1f}",
            "compiled in, s": "{ready_seconds:.0f}",
        },
    ),
}
ENDS: Mapping[str, Cell] = {
    "part": "{part}",
    "what": "{what}",
    "of": lambda r: " ".join(
        str(r[k]) for k in ("drafter", "config", "kind", "nodes", "batch") if k in r
    ),
    "error": lambda r: r.get("error", "").replace("|", "/").replace("\n", " ")[:200],
}


def write_summary(out: Path) -> str:
    """Write summary.md from the figures so far; returns it."""
    rows = read_rows(out)
    text = "\n".join(sections(rows))
    for race in sorted(out.glob("*/race.md")):
        text += f"\n## {race.parent.name}\n\n{race.read_text()}"
    write_text(out / "summary.md", text)
    return text


def sections(rows: Sequence[Json]) -> list[str]:
    """The machine, a table for each kind of figure, profiles, then errors and what had no time."""
    lines = [f"- {k}: {v}" for r in rows if r["what"] == "machine" for k, v in r.items() if k not in ("part", "at", "what")]  # fmt: skip
    valid = [r for r in rows if "error" not in r]

    def section(title: str, rows: Sequence[Json], columns: Mapping[str, Cell]) -> None:
        if rows:
            lines.append(f"\n## {title}\n\n{table_of(rows, columns)}\n")

    for kind, (title, columns) in TABLES.items():
        section(title, [r for r in valid if r["what"] == kind], columns)
        if kind == "exact":
            stages = against_a_cpu(valid)
            section("Losses of three training steps against a CPU's, tiny models", stages, {
                "recipe": "{config}", "type": "{kind}", "attention": "{attention}",
                "largest relative difference": "{difference:.1e}",
            })  # fmt: skip
    for r in valid:
        if r["what"] == "profile":
            longest = [(n, f"{ms:.3f}", f"{times:.0f}") for n, ms, times in r["longest"]]
            table = markdown_table(("kernel", "ms a step", "times"), longest)
            lines.append(f"\n## Profile: {r['drafter']}, {r['nodes']} nodes\n\n{table}\n")
    is_end: Callable[[Json], bool] = lambda r: "error" in r or r["what"] == "out of time"  # noqa: E731
    section("Errors, and what had no time", [r for r in rows if is_end(r)], ENDS)
    return lines


def against_a_cpu(rows: Sequence[Json]) -> list[Json]:
    """Rows of `stage` on an accelerator with `difference`, the largest of a loss relative to a CPU's."""
    stages = [r for r in rows if r["what"] == "stage"]
    on_cpu = {
        (r["config"], r["kind"]): r["losses"] for r in stages if r["platform"] == "cpu"
    }
    compared = []
    for r in stages:
        base = on_cpu.get((r["config"], r["kind"]))
        if r["platform"] == "cpu" or base is None:
            continue
        pairs = [(a, b) for run, its in zip(r["losses"], base) for a, b in zip(run, its)]
        difference = max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)
        compared.append(r | {"difference": difference})
    return compared
