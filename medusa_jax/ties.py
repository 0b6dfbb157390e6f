"""`python -m medusa_jax.ties`: the tie report of one precision.

In bfloat16 (and float32) drafted text may leave plain text where two scores are tied within
rounding. For every prompt: the first divergence, the gap between the two best scores there, the
noise band measured at that position, and whether the one explains the other. A divergence that
rounding does not explain would be a defect; the exit status is then 1.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_jax.cli.flags import (
    add_generation,
    add_limit,
    add_model,
    command,
    load_model,
    run_command,
)
from medusa_jax.console import announced, say

DEMO_PROMPTS = Path(__file__).parent / "demo" / "prompts.jsonl"
EXAMPLES = """examples:
  python -m medusa_jax.ties
  python -m medusa_jax.ties --dtype float32 --tree 64 --temperature 0.7 --top_p 0.9
  python -m medusa_jax.ties --model path/to/model --drafter path/to/heads --prompts q.jsonl
"""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax.ties",
        "Where drafted text leaves plain text in low precision, and whether it is a tie.",
        EXAMPLES,
    )
    p.add_argument("--prompts", default=str(DEMO_PROMPTS), help="questions, as for bench")
    add_limit(p, 50)
    add_model(p)
    p.set_defaults(dtype="bfloat16")
    p.add_argument("--tree", default="64", help="as for decode.py (default: 64 nodes)")
    add_generation(p)
    p.add_argument("--top_p", type=float, default=1.0)
    p.add_argument("--batch_size", type=int, default=1, help="prompts decoded at a time")
    p.add_argument("--out", default="work/ties.json", help="file for all figures")
    return p


def report(model: Any, prompts: list[list[int]], flags: argparse.Namespace) -> dict:
    """Decode every prompt both ways and judge each first divergence."""
    from tqdm import tqdm

    from medusa_jax.api import Options
    from medusa_jax.decoding.ties import find_divergence
    from medusa_jax.tree import Tree

    options = Options(
        max_new_tokens=flags.max_new_tokens,
        temperature=flags.temperature,
        top_p=flags.top_p,
        seed=flags.seed,
    )
    size = min(flags.batch_size, len(prompts))
    compared = 0
    found: list[dict[str, Any]] = []
    for start in tqdm(range(0, len(prompts), size), unit="batch", disable=None):
        ids = list(range(start, min(start + size, len(prompts))))
        rows = ids + [ids[-1]] * (size - len(ids))
        batch = [prompts[i] for i in rows]
        with announced("compiling"):
            drafted = model.generate(batch, options, rows)
            plain = model.generate(batch, options, rows, tree=Tree.none())
        for i, ours, theirs in zip(ids, drafted, plain):
            one = find_divergence(
                model, prompts[i], ours.token_ids, theirs.token_ids, options, i, model.tree
            )
            # Behind a divergence the texts are different texts and say nothing more.
            compared += one.position + 1 if one else ours.new_tokens
            if one:
                found.append({"prompt": i, **dataclasses.asdict(one), "is_tie": one.is_tie})
    return {
        "dtype": str(model.dtype),
        "tree_nodes": model.tree.n_nodes,
        "temperature": flags.temperature,
        "top_p": flags.top_p,
        "prompts": len(prompts),
        "tokens_compared": compared,
        "divergences": found,
        "divergences_per_token": len(found) / max(1, compared),
        "prompts_that_diverge": len(found) / len(prompts),
        "not_explained": sum(not one["is_tie"] for one in found),
    }


def table(facts: dict[str, Any]) -> str:
    """The divergences as a Markdown table, and one line that sums them up."""
    lines = [
        "| prompt | token | gap of the two best scores | noise band | explained |",
        "|---|---|---|---|---|",
    ]
    for one in facts["divergences"]:
        why = "at a filter's cut" if one["at_cut"] else "tie" if one["is_tie"] else "NO"
        lines.append(
            f"| {one['prompt']} | {one['position']} | {one['gap']:.3g} "
            f"| {one['noise_band']:.3g} | {why} |"
        )
    lines.append(
        f"\n{facts['dtype']}, {facts['tree_nodes']} nodes, T {facts['temperature']:g}: "
        f"{len(facts['divergences'])} of {facts['prompts']} texts diverge, "
        f"{facts['divergences_per_token']:.1e} per token over {facts['tokens_compared']} tokens; "
        f"{facts['not_explained']} not explained by rounding"
    )
    return "\n".join(lines)


def run(flags: argparse.Namespace) -> int:
    """The report; exit status 1 if rounding does not explain every divergence."""
    from medusa_jax.bench import prompt_of, read_questions
    from medusa_jax.console import use_compilation_cache

    use_compilation_cache()
    questions = read_questions(flags.prompts, flags.limit)
    model = load_model(flags, needs_heads=True, tree=flags.tree)
    prompts = [model.encode(prompt_of(question)) for question in questions]
    facts = report(model, prompts, flags)
    out = Path(flags.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(facts, indent=1) + "\n")
    print(table(facts))
    say(f"wrote {out}")
    return 1 if facts["not_explained"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
