"""`python -m medusa_jax replay`: accepted lengths on a question file, for many drafters and trees.

The model answers every turn once, plainly; then `evaluate/recording.py` says what each drafter would have
guessed. No step is timed, so the figures are the same on every machine, and a drafter takes one pass
over the answers. What drafts cost and how fast they are: `bench questions`.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_jax.commands.flags import (
    BaseFlags,
    GenerationFlags,
    add_base,
    add_generation,
    add_limit,
    at_least,
    command,
    generation_options,
    load_model,
    numbers,
    run_command,
)
from medusa_jax.commands.prompts import TemplateFlags, add_template, prompt_room
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.evaluate.questions import grouped, read_prompts, read_questions, spread
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.repetition import mean_repeated_ngram_share
from medusa_jax.tree import Tree
from medusa_jax.tree.files import tree_of_size
from medusa_jax.tree.growth import (
    Recorded,
    growth_with_copies,
    joint_growth,
    replayed_tokens,
)
from medusa_jax.tree.tree import COPIED
from medusa_jax.whole_files import write_json, write_text

EXAMPLES = """examples:
  python -m medusa_jax replay --model smollm2 --questions mt_bench.jsonl
  python -m medusa_jax replay --model smollm2 --questions spec_bench.jsonl --limit 180 \\
      --drafters hydrapp,work/smollm2/medusa/export --fit heldout.jsonl --temperature 0.7
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(TemplateFlags, GenerationFlags, BaseFlags):
    """Flags of `replay`."""

    questions: str
    limit: int
    drafters: str
    nodes: str
    fit: str | None
    fit_limit: int
    no_copies: bool
    out: str


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax replay",
        "Mean accepted lengths on a question file, without timings.",
        EXAMPLES,
    )
    p.add_argument("--questions", required=True, metavar="FILE",
                   help="a question file as for bench: Spec-Bench, MT-bench, GSM8K, ..., all turns")  # fmt: skip
    add_limit(p, 0)
    p.add_argument("--model", help="as for decode.py (default: the demo)")
    p.add_argument("--drafters", default="",
                   help="comma-separated names or directories of heads (default: the model's own)")  # fmt: skip
    p.add_argument("--nodes", default="8,64", help="sizes of trees (default: 8,64)")
    p.add_argument("--fit", metavar="FILE",
                   help="JSONL of other prompts or conversations to grow the trees on (default: the order in "
                   "the tree file next to the heads)")  # fmt: skip
    p.add_argument(
        "--fit_limit", type=at_least(1), default=64, help="most of them (default: 64)"
    )
    p.add_argument("--no_copies", action="store_true",
                   help="trees of the heads' guesses alone, without a chain copied from the text")  # fmt: skip
    add_base(p)
    add_generation(p)
    add_template(p)
    p.add_argument("--out", default="work/replay", help="directory for results")
    return p


def run(flags: Flags) -> int:
    """Write the answers, or read them; replay every drafter on them; print the table."""
    from medusa_jax.api import default_drafter
    from medusa_jax.console import use_compilation_cache
    from medusa_jax.evaluate.conversation import asked, ending_turns, find_template
    from medusa_jax.evaluate.fitting import GROWTH
    from medusa_jax.evaluate.recording import record

    sizes = numbers(flags.nodes, "--nodes")
    if min(sizes) < 2 or max(sizes) > GROWTH + 1:
        raise UserError(f"--nodes are sizes of trees, from 2 to {GROWTH + 1}")
    use_compilation_cache()
    questions = spread(read_questions(flags.questions), flags.limit)
    fitted = read_prompts(flags.fit, flags.fit_limit, messages=True) if flags.fit else []
    options = generation_options(flags)
    Path(flags.out).mkdir(parents=True, exist_ok=True)
    texts: list[Any] = []
    columns: dict[str, list[float]] = {}
    for name in (flags.drafters or default_drafter(flags.model)).split(","):
        model = load_model(flags, name, needs_heads=True, tree="none")
        if not model.drafter.trained:
            raise UserError(f"{name} has no heads whose guesses could be ranked: see bench")
        template = find_template(model, flags.chat_template)
        own = ending_turns(model, options, template)
        if not texts:
            categories, texts = answers_to(model, questions, own, template, flags)
        recorded = record(model, texts, own)
        how = "growing trees and " if fitted else ""
        inform(f"{name}: {how}walking through {len(texts)} texts ...")
        records = [asked(model, one) for one in fitted]
        for tree in trees_for(model, records, own, sizes, copies=not flags.no_copies):
            columns[f"{name}, {tree.n_nodes}"] = [
                replayed_tokens([recorded[i] for i in group], tree)
                for group in grouped(categories).values()
            ]
        # Write after each drafter, so that an interrupted run keeps the finished columns.
        text = replay_table(categories, texts, columns)
        write_text(Path(flags.out) / "replay.md", text + "\n")
    print(text)
    rule = f"T {flags.temperature:g}" if flags.temperature else "greedy"
    inform(
        f"mean accepted lengths by drafter and nodes, {rule}, at most {flags.max_new_tokens} tokens a "
        f"turn; wrote {flags.out}/replay.md and texts.json"
    )
    return 0


def answers_to(
    model: Any,
    questions: Sequence[dict[str, Any]],
    options: Any,
    template: str,
    flags: Flags,
) -> tuple[list[str], list[Any]]:
    """Categories, and the model's text of every turn; kept in texts.json for the next call."""
    from medusa_jax.evaluate.conversation import all_turns
    from medusa_jax.evaluate.recording import Text, own_texts

    file = Path(flags.out) / "texts.json"
    names = (
        "model", "dtype", "weights", "limit", "max_new_tokens", "temperature", "seed",
        "no_repeat_ngram_size", "max_prompt_tokens",
    )  # fmt: skip
    settings = {name: getattr(flags, name) for name in names} | {"template": template}
    settings["questions"] = hashlib.sha256(Path(flags.questions).read_bytes()).hexdigest()
    if file.exists() and (kept := json.loads(file.read_text()))["settings"] == settings:
        inform(f"{file} has the answers")
        return kept["categories"], [Text(*one) for one in kept["texts"]]
    room = prompt_room(flags, model.config.max_position, flags.max_new_tokens)

    def ask(prompts: list[list[int]], _: list[int]) -> list[tuple[Text, str]]:
        return [(text, text.said) for text in own_texts(model, prompts, options)]

    found = all_turns(model, questions, template, room, ask)
    categories = [questions[turn.number]["category"] for turn in found]
    texts = [turn.outcome for turn in found]
    content = {"settings": settings, "categories": categories, "texts": texts}
    write_json(file, content, indent=None)
    return categories, texts


def trees_for(
    model: Any, prompts: Sequence[Any], options: Any, sizes: Sequence[int], *, copies: bool
) -> list[Tree]:
    """Trees of these sizes: grown on other texts of the model, or cut from the heads' tree file."""
    from medusa_jax.evaluate.fitting import GROWTH
    from medusa_jax.evaluate.recording import rank_texts

    if prompts:
        recorded = Recorded.joined(rank_texts(model, prompts, options))
        if copies:
            growth = growth_with_copies(recorded, GROWTH)
        else:
            growth = joint_growth(recorded.ranks_PK, GROWTH)
    elif model.calibrated is None:
        raise UserError("no tree file is next to the heads: give --fit")
    else:
        growth = model.calibrated["growth"]
        if not copies:
            growth = [choice for choice in growth if COPIED not in choice]
    return [tree_of_size(growth, size) for size in sizes]


def replay_table(
    categories: Sequence[str], texts: Sequence[Any], columns: Mapping[str, Sequence[float]]
) -> str:
    """A row per category, a column per drafter and tree."""
    rows = []
    for at, (category, group) in enumerate(grouped(categories).items()):
        repeated = mean_repeated_ngram_share([texts[i].answer for i in group])
        lengths = (f"{column[at]:.2f}" for column in columns.values())
        rows.append((category, len(group), f"{repeated:.2f}", *lengths))
    return markdown_table(("category", "turns", "repeated 4-grams", *columns), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), Flags, run, argv)


if __name__ == "__main__":
    sys.exit(main())
