"""`python -m medusa_jax ties`: the tie report of one precision.

In bfloat16 (and float32) drafted text may leave plain text where two scores are tied within
rounding. For every prompt: the first divergence, the gap between the two best scores there, the
noise band measured at that position, and whether the one explains the other. A divergence that
rounding does not explain would be a defect; the exit status is then 1.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from medusa_jax.commands.flags import (
    GenerationFlags,
    ModelFlags,
    add_generation,
    add_model,
    at_least,
    command,
    file_to_write,
    generation_options,
    load_model,
    run_command,
)
from medusa_jax.commands.prompts import (
    PromptFlags,
    add_prompt_files,
    first_prompts,
    prompt_room,
    questions_of,
)
from medusa_jax.console import inform
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.whole_files import write_json

EXAMPLES = """examples:
  python -m medusa_jax ties
  python -m medusa_jax ties --dtype float32 --tree 64 --temperature 0.7 --top_p 0.9
  python -m medusa_jax ties --model path/to/model --drafter path/to/heads --prompts q.jsonl
  python -m medusa_jax ties --model smollm2 --questions mt_bench.jsonl --limit 0 --batch_size 8 \\
      --dtype float32 --tree auto --max_new_tokens 512
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(PromptFlags, GenerationFlags, ModelFlags):
    """Flags of `ties`."""

    tree: str
    top_p: float
    batch_size: int
    out: str


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax ties",
        "Where drafted text leaves plain text in low precision, and whether it is a tie.",
        EXAMPLES,
    )
    add_prompt_files(p, 50)
    add_model(p)
    p.set_defaults(dtype="bfloat16")
    p.add_argument("--tree", default="64", help="as for decode.py (default: 64 nodes)")
    add_generation(p)
    p.add_argument("--top_p", type=float, default=1.0)
    p.add_argument(
        "--batch_size", type=at_least(1), default=1, help="prompts decoded at a time"
    )
    p.add_argument("--out", default="work/ties.json", help="file for all figures")
    return p


def divergence_table(facts: dict[str, Any]) -> str:
    """The divergences as a Markdown table, and one line that sums them up."""
    cells = []
    for one in facts["divergences"]:
        why = "at a filter's cut" if one["at_cut"] else "tie" if one["is_tie"] else "NO"
        gap, band = f"{one['gap']:.3g}", f"{one['noise_band']:.3g}"
        cells.append((one["prompt"], one["position"], gap, band, why))
    header = ("prompt", "token", "gap of the two best scores", "noise band", "explained")
    return (
        f"{markdown_table(header, cells)}\n\n"
        f"{facts['dtype']}, {facts['tree_nodes']} nodes, T {facts['temperature']:g}: "
        f"{len(facts['divergences'])} of {facts['prompts']} texts diverge, "
        f"{facts['divergences_per_token']:.1e} per token over {facts['tokens_compared']} tokens; "
        f"{facts['not_explained']} not explained by rounding"
    )


def run(flags: Flags) -> int:
    """The report; exit status 1 if rounding does not explain every divergence."""
    from medusa_jax.console import use_compilation_cache
    from medusa_jax.evaluate.compare import Comparison
    from medusa_jax.evaluate.conversation import all_turns, ending_turns, find_template
    from medusa_jax.evaluate.ties import compare_batches, tie_report

    use_compilation_cache()
    options = generation_options(flags, top_p=flags.top_p)
    questions = questions_of(flags)
    out = file_to_write(flags.out, "--out")
    batch = min(flags.batch_size, len(questions))
    model = load_model(flags, needs_heads=True, tree=flags.tree, batch=batch)
    if flags.questions:
        template = find_template(model, flags.chat_template)
        options = ending_turns(model, options, template)
        room = prompt_room(flags, model.config.max_position, flags.max_new_tokens)

        def ask(prompts: list[list[int]], _: list[int]) -> list[tuple[Comparison, str]]:
            found = compare_batches(model, prompts, options, flags.batch_size)
            return [(one, one.autoregressive.text) for one in found]

        turns = all_turns(model, questions, template, room, ask)
        found = [
            (f"{questions[t.number]['question_id']}, turn {t.turn + 1}", t.outcome)
            for t in turns
        ]
    else:
        prompts = first_prompts(flags, model, questions, flags.max_new_tokens)
        compared = compare_batches(model, prompts, options, flags.batch_size)
        found = [(str(i), one) for i, one in enumerate(compared)]
    facts = tie_report(model, options, found)
    write_json(out, facts)
    print(divergence_table(facts))
    inform(f"wrote {out}")
    return 1 if facts["not_explained"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), Flags, run, argv)


if __name__ == "__main__":
    sys.exit(main())
