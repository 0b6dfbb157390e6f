"""`medusa bench`: drafters, trees and plain decoding, interleaved on every prompt.

For every contender: tokens per step, step latency and speed-up against this engine's own
autoregressive loop, divergences, and how much its text repeats itself (text that runs in circles is
easy to guess).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from medusa_jax.commands.entrants import (
    Entrant,
    contenders_of,
    default_names,
    load_entrants,
    marked,
)
from medusa_jax.commands.flags import CommandLine, at_least, flag, numbers, out_directory
from medusa_jax.commands.model_flags import BaseFlags, GenerationFlags, generation_options
from medusa_jax.errors import UserError
from medusa_jax.evaluate.prompt_files import (
    DEMO_PROMPTS,
    read_prompts,
    record_prompts,
    spread,
)
from medusa_jax.evaluate.question_files import read_questions
from medusa_jax.evaluate.tables import Cell, device_facts, write_report
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.api import Model, Options

EXAMPLES = """examples:
  medusa bench
  medusa bench --drafters hydra,medusa --trees auto,64 --limit 8
  medusa bench --drafters medusa@8,prompt_lookup@copy:3 --limit 16
  medusa bench --drafters hydra --batches 1,2,4,8
  medusa bench --model path/to/model --drafters path/to/heads,none \\
      --prompts question.jsonl
  medusa bench --model smollm2 --drafters hydrapp@8 \\
      --questions mt_bench.jsonl --by_category
"""
COLUMNS: dict[str, Cell] = {
    "drafter": "{label}",
    "nodes": "{tree_nodes}",
    "mean accepted length": "{mean_accepted_length:.2f}",
    "step latency": "{step_latency_ratio:.2f}x",
    "speed-up": "{speedup:.2f}x",
    "least, median": "{least_speedup:.2f}x, {median_speedup:.2f}x",
    "with prefill": "{end_to_end_speedup:.2f}x",
    "tokens/s": "{tokens_per_second:.0f}",
    "diverged": "{divergences} of {texts}",
    "repeated 4-grams": "{repeated_4grams:.2f}",
}


@dataclass(frozen=True, kw_only=True)
class RaceFlags(GenerationFlags, BaseFlags):
    """Prompts, trees and rounds."""

    prompts: str = flag(
        "JSONL with prompt or prompt_ids; or with messages, whose last user turn is answered, or turns "
        "(MT-bench, Spec-Bench: the first), through the chat template; or training data (default: the demo's)",
        str(DEMO_PROMPTS),
    )
    limit: int = flag(
        "most prompts, of all categories alike; 0 is all", 50, type=at_least(0)
    )
    repeats: int = flag("timed rounds; medians count", 3, type=at_least(1))
    out: str = flag("directory for results", "work/bench")
    trees: str = flag(
        "comma-separated --tree values (cartesian widths with x: cartesian:2x3)", "auto"
    )


@dataclass(frozen=True, kw_only=True)
class TemplateFlags:
    """How a question becomes a prompt."""

    chat_template: str = flag(
        "a shipped one (default: the tokenizer's own); for --questions also plain: none, the default if the "
        "tokenizer has none",
        "",
    )
    max_prompt_tokens: int = flag(
        "for --questions: longer prompts are cut (default: 2048, or what the context leaves next to "
        "the answer)",
        0,
        type=at_least(0),
    )


@dataclass(frozen=True, kw_only=True)
class Flags(TemplateFlags, RaceFlags):
    """Compare drafters and trees with the autoregressive loop."""

    drafters: tuple[str, ...] = flag(
        "comma-separated names, directories, files or hub ids; NAME@TREE gives one a tree, none is plain "
        "decoding (default: all heads that come with the model, and prompt_lookup)",
        (),
    )
    questions: str | None = flag(
        "instead of --prompts: a question file as published (Spec-Bench, MT-bench, AlpacaEval, HumanEval, "
        "GSM8K, XSUM, CNN/DM), all turns; answers are also written in Spec-Bench's format",
        None,
        metavar="FILE",
    )
    by_category: bool = flag("a row for each category of the prompts", False)
    batches: tuple[int, ...] = flag(
        "comma-separated batch sizes; prompts are cut to one length, and texts do not end early "
        "(default: a prompt at a time)",
        (),
        type=numbers(least=1),
    )


class Tasks(NamedTuple):
    """What is decoded.

    Attributes:
      prompts: token ids.
      categories: of each prompt.
      options: whose texts end where the chat template ends a turn.
      questions: the question file; empty for --prompts.
      numbers: the question of each prompt.
      facts: for the report.
    """

    prompts: list[list[int]]
    categories: list[str]
    options: "Options"
    questions: Sequence[Json]
    numbers: Sequence[int]
    facts: Json


def prompts_of(flags: RaceFlags) -> list[Json]:
    """Records of --prompts; without the demo's token ids for another model."""
    records = spread(read_prompts(flags.prompts), flags.limit)
    if flags.model and flags.prompts == str(DEMO_PROMPTS):
        return [{k: v for k, v in r.items() if not k.endswith("_ids")} for r in records]
    return records


def prompt_tasks(flags: Flags, model: "Model") -> Tasks:
    """The prompts of --prompts."""
    records = prompts_of(flags)
    records, texts, options = record_prompts(
        model, records, generation_options(flags), flags.chat_template
    )
    prompts = [model.encode(text) for text in texts]
    categories = [str(r.get("category", r.get("file", "all"))) for r in records]
    return Tasks(prompts, categories, options, (), range(len(prompts)), {})


def question_tasks(flags: Flags, path: str, model: "Model") -> Tasks:
    """All turns of --questions; plain decoding gives the answers before later turns."""
    from medusa_jax.evaluate.turns import answered_turns, find_template, prompt_room

    questions = spread(read_questions(path), flags.limit)
    options, context = generation_options(flags), model.config.max_position
    template = find_template(model, flags.chat_template)
    options = model.ending_turns(options, template)
    room = prompt_room(flags.max_prompt_tokens, context, flags.max_new_tokens)
    turns = answered_turns(model, questions, template, room, options)
    facts = {
        "questions": path,
        "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        "prompts_cut": sum(turn.cut for turn in turns),
    }
    return Tasks(
        [turn.text.prompt for turn in turns],
        [questions[turn.number]["category"] for turn in turns],
        options,
        questions,
        [turn.number for turn in turns],
        facts,
    )


def race_prompts(
    flags: Flags, entrants: Sequence[Entrant], tasks: Tasks, out: Path
) -> list[Json]:
    """Race a prompt at a time; a row per contender, or per contender and category."""
    from medusa_jax.evaluate.race import rows_of, timed_runs
    from medusa_jax.evaluate.spec_bench import write_answers
    from medusa_jax.evaluate.turns import grouped

    contenders = contenders_of(entrants, tasks.options)
    runs = timed_runs(contenders, tasks.prompts, flags.repeats)
    if tasks.questions:
        for contender, of_one in zip(contenders, runs):
            name = f"{contender.label}-{contender.facts['tree_nodes']}"
            write_answers(out, name, tasks.questions, tasks.numbers, of_one)
    if not flags.by_category:
        return rows_of(contenders, runs, tasks.prompts, tasks.numbers)
    rows = []
    for category, group in grouped(tasks.categories).items():
        of_group = [[of_one[i] for i in group] for of_one in runs]
        prompts = [tasks.prompts[i] for i in group]
        numbers = [tasks.numbers[i] for i in group]
        for row in rows_of(contenders, of_group, prompts, numbers):
            rows.append({"category": category} | row)
    return rows


def race_batches(flags: Flags, entrants: Sequence[Entrant], tasks: Tasks) -> list[Json]:
    """Race all prompts in batches of each size; all rows of a batch have one length."""
    from medusa_jax.evaluate.race import race

    length = min(map(len, tasks.prompts))
    prompts = [prompt[-length:] for prompt in tasks.prompts]
    options = replace(tasks.options, eos_ids=())
    contenders = contenders_of(entrants, options, flags.batches)
    return race(contenders, [prompts], flags.repeats, warm_up=False)


def run(flags: Flags) -> int:
    """Race all drafters, all their trees and plain decoding; print the table, write the files."""
    from medusa_jax.kept_programs import use_compilation_cache

    if flags.batches and flags.by_category:
        raise UserError("--by_category does not go with --batches")
    use_compilation_cache()
    out = out_directory(flags.out, "--out")
    drafters = flags.drafters or default_names(flags.model)
    entrants = marked([*load_entrants(flags, drafters, flags.trees)])
    model = entrants[0].model
    if flags.questions:
        tasks = question_tasks(flags, flags.questions, model)
    else:
        tasks = prompt_tasks(flags, model)
    columns = dict(COLUMNS)
    if flags.batches:
        columns = {"batch": "{batch}", **COLUMNS}
        rows = race_batches(flags, entrants, tasks)
    else:
        if flags.by_category:
            columns = {"category": "{category}", **COLUMNS}
        rows = race_prompts(flags, entrants, tasks, out)
    facts = {
        **device_facts(),
        **tasks.facts,
        "dtype": str(model.dtype),
        "temperature": flags.temperature,
        "max_new_tokens": flags.max_new_tokens,
        "repeats": flags.repeats,
        "rows": rows,
    }
    notes = (
        f"autoregressive loop: {rows[0]['autoregressive_tokens_per_second']:.0f} tokens/s; "
        f"T {flags.temperature:g} ({facts['device']}, {facts['dtype']}, {facts['date']})"
    )
    write_report(out, "race", facts, rows, columns, notes)
    return 0


main = CommandLine("medusa bench", Flags, run, EXAMPLES)
