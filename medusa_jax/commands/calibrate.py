"""`python -m medusa_jax calibrate`: fit the draft tree to the heads and to this device.

Writes a tree file with its evidence (measured by `evaluate/fitting.py`) and a rung for each
number of rows; decoding uses the one next to the heads.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from medusa_jax.commands.flags import (
    GenerationFlags,
    MeshFlags,
    ModelFlags,
    Program,
    at_least,
    file_to_write,
    flag,
    generation_options,
    load_model,
    numbers,
)
from medusa_jax.commands.following import following
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import Row
from medusa_jax.whole_files import write_json

EXAMPLES = """examples:
  python -m medusa_jax calibrate --prompts prompts.jsonl --out tree.json
  python -m medusa_jax calibrate --model path/to/model --drafter path/to/heads \\
      --prompts prompts.jsonl --out path/to/heads/tree.json --plots work/plots
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(GenerationFlags, MeshFlags, ModelFlags):
    """Fit the draft tree to the heads and to this device."""

    prompts: str | None = flag(
        "JSONL with prompt or prompt_ids, or with messages (as distill writes them), whose last "
        "question is answered",
        None,
    )
    limit: int | None = flag(
        "most prompts to use; 0 is all (default: 16 on a CPU, else 64)",
        None,
        type=at_least(0),
    )
    out: str | None = flag("tree file to write (JSON)", None)
    batches: tuple[int, ...] | None = flag(
        "numbers of rows that get a tree each, down to plain decoding; the evidence is timed at the "
        "first (default: 1,4 on a CPU, else 1,2,4,8,16)",
        None,
        type=numbers(least=1),
    )
    sizes: tuple[int, ...] = flag(
        "tree sizes to time, until larger ones are clearly slower",
        "1,2,3,4,5,6,8,10,12,16,24,32,48,64",
        type=numbers(least=1),
    )
    rounds: int = flag("timed rounds of each size", 7, type=at_least(1))
    no_copies: bool = flag(
        "trees of the heads' guesses alone, without a chain copied from the text", False
    )
    plots: str | None = flag("directory for PNG plots (needs matplotlib)", None)


def run(flags: Flags) -> int:
    """Calibrate, write the tree file, print what was measured."""
    import jax

    from medusa_jax.console import use_compilation_cache
    from medusa_jax.evaluate.conversation import asked, ending_turns
    from medusa_jax.evaluate.fitting import fit_tree
    from medusa_jax.evaluate.questions import read_prompts

    use_compilation_cache()
    if not (flags.prompts and flags.out):
        raise UserError("give --prompts and --out")
    small = jax.default_backend() == "cpu"
    limit = (16 if small else 64) if flags.limit is None else flags.limit
    batches = flags.batches or ((1, 4) if small else (1, 2, 4, 8, 16))
    records = read_prompts(flags.prompts, limit, messages=True)
    out = file_to_write(flags.out, "--out")
    model = load_model(flags, needs_heads=True, tree="none")
    options = generation_options(flags)
    if {"messages", "turns"} & records[0].keys():
        options = ending_turns(model, options, "")
    inform(
        f"two stages: text for {len(records)} prompts with its ranks, then step latencies of growing "
        f"trees for each of {len(batches)} batch sizes"
    )
    kept = Path(f"{out}.ranks")
    found = fit_tree(
        model,
        [asked(model, record) for record in records],
        options,
        flags.sizes,
        batches=batches,
        rounds=flags.rounds,
        copies=not flags.no_copies,
        keep=kept,
    )
    write_json(out, found)
    kept.unlink(missing_ok=True)
    evidence = found["evidence"]
    print("fitted trees")
    print_sizes(evidence["ladder"])
    for rung in found["batches"]:
        print_rung(rung)
    if flags.plots:
        draw(found, Path(flags.plots))
    inform(f"wrote {out}: {found['nodes']} nodes for {found['device']}")
    prompt = "Hello" if "messages" in records[0] else "import os"
    following("decode", model=flags.model, drafter=flags.drafter, prompt=prompt, compare="")
    return 0


def print_sizes(rows: Sequence[Row]) -> None:
    """Print the evidence of each size: tokens counted on held-out texts, steps timed here."""
    print("nodes  depth  copied  tokens/step  step latency  speed-up (predicted)")
    for row in rows:
        print(
            f"{row['nodes']:5d}  {row['depth']:5d}  {row['copied']:6d}  {row['tokens_per_step']:11.3f}  "
            f"{row['step_latency_ratio']:11.2f}x  {row['predicted_speedup']:8.2f}"
        )


def print_rung(rung: Row) -> None:
    """Print the best tree for this batch size and its measurements."""
    print(f"\n{rung['batch']} at a time")
    print("nodes  tokens/step  step latency  speed-up  spread of the rounds")
    for row in rung["rows"]:
        mark = " <- best" if row["nodes"] == rung["nodes"] else ""
        print(
            f"{row['nodes']:5d}  {row['tokens_per_step']:11.3f}  "
            f"{row['step_latency_ratio']:11.2f}x  {row['speedup']:8.2f}  "
            f"{100 * row['spread']:8.1f}%{mark}"
        )
    if rung["nodes"] == 1:
        print("plain decoding: no tree is faster on this device")


def draw(found: Row, directory: Path) -> None:
    """The tree, and tokens per step and latency over its size, as PNG."""
    from medusa_jax import plots

    directory.mkdir(parents=True, exist_ok=True)
    evidence = found["evidence"]
    ladder = evidence["ladder"]
    plots.draw_tree(found["choices"], path=str(directory / "tree.png"))
    plots.draw_curves(
        [row["nodes"] for row in ladder],
        [row["tokens_per_step"] for row in ladder],
        [row["step_latency_ratio"] for row in ladder],
        path=str(directory / "curves.png"),
    )


main = Program("python -m medusa_jax calibrate", Flags, run, EXAMPLES)
