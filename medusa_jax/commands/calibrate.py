"""`medusa calibrate`: fit the draft tree to the heads and to this device.

Writes a tree file with its evidence (measured by `evaluate/tree_fit.py`) and a rung for each
number of rows; decoding uses the one next to the heads.
"""

import dataclasses
from pathlib import Path

from medusa_jax.commands import decode_flags
from medusa_jax.commands.flags import (
    CommandLine,
    at_least,
    file_to_write,
    flag,
    numbers,
    out_directory,
)
from medusa_jax.commands.model_flags import (
    GenerationFlags,
    MeshFlags,
    ModelFlags,
    generation_options,
    load_model,
    to_repeat,
)
from medusa_jax.commands.next_command import print_next
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import Cell, Row, table_of
from medusa_jax.whole_files import write_json

EXAMPLES = """examples:
  medusa calibrate --prompts prompts.jsonl --out tree.json
  medusa calibrate --model path/to/model --drafter path/to/heads \\
      --prompts prompts.jsonl --out path/to/heads/tree.json --plots work/plots
"""
LEGEND = """nodes: the root and the drafts that one step verifies, depth: the most in a row; copied: drafts that
are copied from earlier text; tokens/step: on texts that the tree was not fitted to; step latency: times a plain
step; speed-up: tokens/step over step latency; spread: how far repeated timings differ"""
# Columns of the two tables: SIZES has a row per tree size, RUNG one per tree size at a given batch size.
SIZES: dict[str, Cell] = {
    "nodes": "{nodes}",
    "depth": "{depth}",
    "copied": "{copied}",
    "tokens/step": "{tokens_per_step:.3f}",
    "step latency": "{step_latency_ratio:.2f}x",
    "speed-up (predicted)": "{predicted_speedup:.2f}",
}
RUNG: dict[str, Cell] = {
    "nodes": "{nodes}",
    "tokens/step": "{tokens_per_step:.3f}",
    "step latency": "{step_latency_ratio:.2f}x",
    "speed-up": "{speedup:.2f}",
    "spread": "{spread:.1%}",
    "": "{best}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(GenerationFlags, MeshFlags, ModelFlags):
    """Fit the draft tree to the heads and to this device."""

    prompts: str | None = flag(
        "JSONL with prompt or prompt_ids, or training data, whose last questions or beginnings are asked",
        None,
    )
    chat_template: str = flag("a shipped one; default: the tokenizer's own", "")
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
        type=numbers(least=1, most=4096),
    )
    sizes: tuple[int, ...] | None = flag(
        "tree sizes to time, until larger ones are clearly slower (default: up to 64, fewer on a CPU)",
        None,
        type=numbers(least=1, most=128),
    )
    rounds: int = flag("timed rounds of each size", 7, type=at_least(1))
    no_copies: bool = flag(
        "trees of the heads' guesses alone, without a chain copied from the text", False
    )
    plots: str | None = flag("directory for PNG plots (needs matplotlib)", None)


def run(flags: Flags) -> int:
    """Calibrate, write the tree file, print what was measured."""
    import jax

    from medusa_jax.api import default_drafter, find_heads
    from medusa_jax.evaluate.prompt_files import read_prompts, record_prompts
    from medusa_jax.evaluate.texts import distilled_texts
    from medusa_jax.evaluate.tree_fit import fit_tree
    from medusa_jax.kept_programs import use_compilation_cache
    from medusa_jax.training.run_log import outlook
    from medusa_jax.tree.files import TreeFile

    use_compilation_cache()
    if not (flags.prompts and flags.out):
        raise UserError("give --prompts and --out")
    on_cpu = jax.default_backend() == "cpu"
    limit = (16 if on_cpu else 64) if flags.limit is None else flags.limit
    batches = flags.batches or ((1, 4) if on_cpu else (1, 2, 4, 8, 16))
    stored = find_heads(flags.model, flags.drafter or default_drafter(flags.model))
    records = read_prompts(flags.prompts, limit)
    out = file_to_write(flags.out, "--out")
    if out.is_file() and out.stat().st_size:
        try:
            TreeFile.read(out)
        except UserError as error:
            raise UserError(f"--out {out} exists and is not a tree file") from error
    ranks_file = file_to_write(f"{out}.ranks", "--out")
    plots = out_directory(flags.plots, "--plots") if flags.plots else None
    model = load_model(flags, needs_heads=True, tree="none")
    texts = []
    if not flags.temperature:  # sampled answers were drawn with other noise
        texts = distilled_texts(model, flags.prompts, records, flags.max_new_tokens)
    options, template = generation_options(flags), flags.chat_template
    records, prompts, options = record_prompts(model, records, options, template)
    origin = f"from {flags.prompts}" if texts else "that are written now"
    inform(
        f"two stages: the heads' guesses in {len(texts or prompts)} answers {origin}, then step latencies of "
        f"growing trees for each of {len(batches)} batch sizes"
    )
    fit = fit_tree(
        model,
        prompts,
        options,
        flags.sizes or (),
        batches=batches,
        rounds=flags.rounds,
        copies=not flags.no_copies,
        keep=ranks_file,
        texts=texts,
    )
    write_json(out, fit)
    ranks_file.unlink(missing_ok=True)
    evidence = fit["evidence"]
    print(f"fitted trees\n{table_of(evidence['ladder'], SIZES)}\n{LEGEND}")
    for rung in fit["batches"]:
        mark = {"best": "<- best"}
        rows = [r | mark if r["nodes"] == rung["nodes"] else r for r in rung["rows"]]
        print(f"\n{rung['batch']} at a time\n{table_of(rows, RUNG)}")
        if rung["nodes"] == 1:
            print("plain decoding: no tree is faster on this device")
    if plots:
        draw(fit, plots)
    print(verdict(fit))
    if line := stored and outlook(Path(stored.directory).parent):
        print(line)
    inform(f"wrote {out}: {fit['nodes']} nodes for {fit['device']}")
    is_chat = any("messages" in record for record in records)
    is_chat = is_chat and bool(template or model.tokenizer.chat_template)
    example = {"chat": template, "prompt": "Hello"} if is_chat else {"prompt": "import os"}
    found = stored and Path(stored.directory, "tree.json").resolve() == out.resolve()
    tree = None if found else str(out)
    given = to_repeat(flags, decode_flags.Flags)
    print_next("decode", **given, tree=tree, **example, compare="")
    return 0


def verdict(fit: Row) -> str:
    """How often first guesses are right, the speed-up here, and what better heads would give."""
    from medusa_jax.tree.tree import Tree

    first, tree = fit["batches"][0], Tree.from_choices(fit["choices"], fit["spares"])
    rows = sorted(
        first["rows"], key=lambda row: (row["nodes"] == first["nodes"], row["speedup"])
    )
    accuracies = " ".join(f"{head[0]:.0%}" for head in fit["evidence"]["head_accuracies"])
    lines = [f"first guesses that are right, head by head: {accuracies}"]
    if rows:
        n, tokens, ratio = (
            rows[-1][x] for x in ("nodes", "tokens_per_step", "step_latency_ratio")
        )
        chosen = n == first["nodes"]
        lines[1:] = [
            f"{'on' if chosen else 'plain decoding is fastest on'} this machine: {n} nodes give {tokens:.2f} "
            f"tokens a step, which takes {ratio:.2f} plain ones: {tokens / ratio:.2f}x the speed of plain decoding",
            f"heads that give {tokens + 0.5:.2f} a step would reach {(tokens + 0.5) / ratio:.2f}x",
        ]
    if tree.n_nodes > 1 and not tree.drafted.depth:
        lines.append(
            "this tree only copies from the text: no guess of the heads is worth its time"
        )
    return "\n".join(lines)


def draw(fit: Row, directory: Path) -> None:
    """The tree, and tokens per step and latency over its size, as PNG."""
    from medusa_jax import plots

    evidence = fit["evidence"]
    ladder = evidence["ladder"]
    plots.draw_tree(fit["choices"], path=str(directory / "tree.png"))
    plots.draw_curves(
        [row["nodes"] for row in ladder],
        [row["tokens_per_step"] for row in ladder],
        [row["step_seconds"] for row in ladder],
        path=str(directory / "curves.png"),
    )


main = CommandLine("medusa calibrate", Flags, run, EXAMPLES, resumes=True)
