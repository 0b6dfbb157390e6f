"""`python -m medusa_jax calibrate`: fit the draft tree to the heads and to this device.

Writes a tree file with its evidence (`evaluate/fitting.py` says what is measured); decode.py uses
the one that lies beside the heads.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_jax.commands.flags import (
    add_generation,
    add_limit,
    add_model,
    command,
    generation_options,
    load_model,
    numbers,
    parse_mesh,
    run_command,
)
from medusa_jax.console import inform
from medusa_jax.errors import UserError

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
EXAMPLES = """examples:
  python -m medusa_jax calibrate --prompts prompts.jsonl --out tree.json
  python -m medusa_jax calibrate --latency_only --batch 4
  python -m medusa_jax calibrate --model path/to/model --drafter path/to/heads \\
      --prompts prompts.jsonl --out path/to/heads/tree.json --plots work/plots
"""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax calibrate",
        "Fit the draft tree to the heads and to this device.",
        EXAMPLES,
    )
    p.add_argument("--prompts", help="JSONL with prompt or prompt_ids, or with messages (as distill writes "
                   "them), whose last question is answered")  # fmt: skip
    add_limit(p, 64)
    p.add_argument("--out", help="tree file to write (JSON)")
    p.add_argument(
        "--latency_only",
        action="store_true",
        help="instead: measure anew which size of the tree file beside the heads pays on this "
        "device, for --tree auto",
    )
    add_model(p)
    p.add_argument("--mesh", default="1,1,1", help="devices along data,fsdp,tensor")
    add_generation(p)
    p.add_argument("--batch", type=int, default=1, help="batch size to time steps at")
    p.add_argument("--sizes", default=",".join(map(str, SIZES)), help="tree sizes to time")
    p.add_argument("--rounds", type=int, default=7, help="timed rounds over all sizes")
    p.add_argument("--values", choices=["joint", "product"], default="joint",
                   help="worth of a node: measured frequency of its path, or the paper's "
                   "product of head accuracies")  # fmt: skip
    p.add_argument("--plots", help="directory for PNG plots (needs matplotlib)")
    return p


def run(flags: argparse.Namespace) -> int:
    """Calibrate, write the tree file, print the ladder."""
    from medusa_jax.console import use_compilation_cache
    from medusa_jax.evaluate.conversation import asked, ending_turns
    from medusa_jax.evaluate.fitting import fit_tree
    from medusa_jax.evaluate.questions import read_prompts

    use_compilation_cache()
    if flags.latency_only:
        return measure_steps(flags)
    if not (flags.prompts and flags.out):
        raise UserError("give --prompts and --out, or --latency_only")
    records = read_prompts(flags.prompts, flags.limit, messages=True)
    model = load_model(flags, needs_heads=True, mesh=parse_mesh(flags.mesh))
    options = generation_options(flags)
    if "messages" in records[0]:
        options = ending_turns(model, options, "")
    found = fit_tree(
        model,
        [asked(model, record) for record in records],
        options,
        numbers(flags.sizes, "--sizes"),
        batch=flags.batch,
        rounds=flags.rounds,
        worth=flags.values,
    )
    out = Path(flags.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print("nodes  tokens/step  step latency  speed-up (predicted)")
    for row in found["evidence"]["ladder"]:
        mark = " <- best" if row["nodes"] == found["nodes"] else ""
        print(
            f"{row['nodes']:5d}  {row['tokens_per_step']:11.3f}  "
            f"{row['step_latency_ratio']:11.2f}x  {row['predicted_speedup']:8.2f}{mark}"
        )
    if flags.plots:
        draw(found, Path(flags.plots))
    inform(f"wrote {out}: {found['nodes']} nodes for {found['device']}")
    return 0


def measure_steps(flags: argparse.Namespace) -> int:
    """Choose anew what `--tree auto` takes on this device, and show why."""
    from medusa_jax.api import device_tree

    model = load_model(
        flags, needs_heads=True, mesh=parse_mesh(flags.mesh), tree="none", batch=flags.batch
    )
    if not device_tree.tokens_by_size(model.calibrated, "cpu"):
        raise UserError(
            "no tree file with evidence lies beside the heads: calibrate with --prompts first"
        )
    marks = (
        model.config, model.drafter.heads, model.dtype, model.storage, model.mesh
    )  # fmt: skip
    kept = device_tree.kept_choice(model.calibrated, flags.batch, *marks)
    found = device_tree.choose_on_device(model, model.calibrated, flags.batch, kept)
    print("nodes  tokens/step  step latency  speed-up")
    for row in found["rows"]:
        mark = " <- best" if row["nodes"] == found["nodes"] else ""
        print(
            f"{row['nodes']:5d}  {row['tokens_per_step']:11.3f}  "
            f"{row['step_latency_ratio']:11.2f}x  {row['speedup']:8.2f}{mark}"
        )
    if found["nodes"] == 1:
        print("plain decoding: no tree pays on this device")
    inform(f"--tree auto takes {found['nodes']} nodes at batch {flags.batch} from now on")
    return 0


def draw(found: dict[str, Any], directory: Path) -> None:
    """The tree, and tokens per step and latency over its size, as PNG."""
    from medusa_jax import plots

    directory.mkdir(parents=True, exist_ok=True)
    ladder = found["evidence"]["ladder"]
    plots.draw_tree(found["choices"], path=str(directory / "tree.png"))
    plots.draw_curves(
        [row["nodes"] for row in ladder],
        [row["tokens_per_step"] for row in ladder],
        [row["step_latency_ratio"] for row in ladder],
        path=str(directory / "curves.png"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
