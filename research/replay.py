"""`python -m research replay`: accepted lengths on a question file, for many drafters and trees.

The model answers every turn once, plainly; then `evaluate/ranks.py` records the guesses of each
drafter. No step is timed, so the figures are the same on every machine, and a drafter takes one pass
over the answers. What drafts cost and how fast they are: `bench --questions`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from medusa_jax.api import Model, Options, default_drafter
from medusa_jax.commands.bench import TemplateFlags
from medusa_jax.commands.flags import CommandLine, at_least, flag, numbers
from medusa_jax.commands.model_flags import (
    BaseFlags,
    GenerationFlags,
    generation_options,
    load_model,
)
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.evaluate.prompt_files import read_prompts, record_prompt, spread
from medusa_jax.evaluate.question_files import read_questions
from medusa_jax.evaluate.ranks import record
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.evaluate.texts import Text
from medusa_jax.evaluate.tree_fit import GROWTH, rank_texts
from medusa_jax.evaluate.turns import answered_turns, find_template, grouped, prompt_room
from medusa_jax.kept_programs import use_compilation_cache
from medusa_jax.text.repetition import mean_repeated_ngram_share
from medusa_jax.tree.growth import order_by_steps, replayed_tokens
from medusa_jax.tree.tree import COPIED, Order
from medusa_jax.whole_files import Json, write_json, write_text

EXAMPLES = """examples:
  python -m research replay --model smollm2 --questions mt_bench.jsonl
  python -m research replay --model smollm2 --questions spec_bench.jsonl --limit 180 \\
      --drafters hydrapp,work/smollm2/medusa/export --fit heldout.jsonl --temperature 0.7
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(TemplateFlags, GenerationFlags, BaseFlags):
    """Mean accepted lengths on a question file, without timings."""

    questions: str = flag(
        "a question file as for bench: Spec-Bench, MT-bench, GSM8K, ..., all turns",
        metavar="FILE",
    )
    limit: int = flag("most questions to use; 0 is all", 0, type=at_least(0))
    drafters: tuple[str, ...] = flag(
        "comma-separated names or directories of heads (default: the model's own)", ()
    )
    nodes: tuple[int, ...] = flag("sizes of trees", (8, 64), type=numbers())
    fit: str | None = flag(
        "JSONL of other prompts or conversations to grow the trees on (default: the order in the tree "
        "file next to the heads)",
        None,
        metavar="FILE",
    )
    fit_limit: int = flag("most of them", 64, type=at_least(1))
    no_copies: bool = flag(
        "trees of the heads' guesses alone, without a chain copied from the text", False
    )
    out: str = flag("directory for results", "work/replay")


def run(flags: Flags) -> int:
    """Write the answers, or read them; replay every drafter on them; print the table."""
    sizes = flags.nodes
    if min(sizes) < 2 or max(sizes) > GROWTH + 1:
        raise UserError(f"--nodes are sizes of trees, from 2 to {GROWTH + 1}")
    use_compilation_cache()
    questions = spread(read_questions(flags.questions), flags.limit)
    fitted = read_prompts(flags.fit, flags.fit_limit) if flags.fit else []
    options = generation_options(flags)
    Path(flags.out).mkdir(parents=True, exist_ok=True)
    texts: list[Text] = []
    columns: dict[str, list[float]] = {}
    for name in flags.drafters or (default_drafter(flags.model),):
        model = load_model(flags, name, needs_heads=True, tree="none")
        if not model.drafter.trained:
            raise UserError(f"{name} has no heads whose guesses could be ranked: see bench")
        template = find_template(model, flags.chat_template)
        ending = model.ending_turns(options, template)
        if not texts:
            categories, texts = answers_to(model, questions, ending, template, flags)
        recorded = record(model, texts, ending)
        method = "growing trees and " if fitted else ""
        inform(f"{name}: {method}walking through {len(texts)} texts ...")
        order = order_for(model, fitted, ending, copies=not flags.no_copies)
        for tree in (order.tree(size) for size in sizes):
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
    model: Model, questions: Sequence[Json], options: Options, template: str, flags: Flags
) -> tuple[list[str], list[Text]]:
    """Categories, and the model's text of every turn; kept in texts.json for the next call."""
    file = Path(flags.out) / "texts.json"
    names = (
        "model", "dtype", "weights", "limit", "max_new_tokens", "temperature", "seed",
        "no_repeat_ngram_size", "repetition_penalty", "max_prompt_tokens",
    )  # fmt: skip
    settings = {name: getattr(flags, name) for name in names} | {"template": template}
    settings["questions"] = hashlib.sha256(Path(flags.questions).read_bytes()).hexdigest()
    if file.exists() and (saved := json.loads(file.read_text()))["settings"] == settings:
        inform(f"{file} has the answers")
        return saved["categories"], [Text(*text_fields) for text_fields in saved["texts"]]
    context = model.config.max_position
    room = prompt_room(flags.max_prompt_tokens, context, flags.max_new_tokens)
    turns = answered_turns(model, questions, template, room, options)
    categories = [questions[turn.number]["category"] for turn in turns]
    texts = [turn.text for turn in turns]
    content = {"settings": settings, "categories": categories, "texts": texts}
    write_json(file, content, indent=None)
    return categories, texts


def order_for(
    model: Model, fitted: Sequence[Json], options: Options, *, copies: bool
) -> Order:
    """The order of nodes: measured on other texts of the model, or from the heads' tree file."""
    if fitted:
        prompts = [record_prompt(model, question) for question in fitted]
        texts = rank_texts(model, prompts, options)
        return order_by_steps(texts, GROWTH, copies=copies)
    if model.trees.file is None:
        raise UserError("no tree file is next to the heads: give --fit")
    order = model.trees.file.order
    if copies:
        return order
    drafted = [choice for choice in order.growth if COPIED not in choice]
    return Order(order.spares or drafted)


def replay_table(
    categories: Sequence[str], texts: Sequence[Text], columns: Mapping[str, Sequence[float]]
) -> str:
    """A row per category, a column per drafter and tree."""
    rows = []
    for at, (category, group) in enumerate(grouped(categories).items()):
        answers = [texts[i].answer for i in group]
        repeated = mean_repeated_ngram_share(answers)
        lengths = (f"{column[at]:.2f}" for column in columns.values())
        rows.append((category, len(group), f"{repeated:.2f}", *lengths))
    return markdown_table(("category", "turns", "repeated 4-grams", *columns), rows)


main = CommandLine("python -m research replay", Flags, run, EXAMPLES)
