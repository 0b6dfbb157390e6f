"""`bench questions`: a published question file, all turns, by category and overall.

Writes a table, a JSON file of all figures and the answers in Spec-Bench's JSONL format. Prompts of
later turns contain plain decoding's answers to the earlier ones.
"""

import hashlib
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import medusa_jax
from medusa_jax.commands.bench_race import (
    TreeFlags,
    contenders_of,
    load_entrants,
    names_of,
    out_directory,
)
from medusa_jax.commands.flags import Program, generation_options
from medusa_jax.commands.prompts import prompt_room, questions_of
from medusa_jax.evaluate.questions import grouped
from medusa_jax.evaluate.tables import Cell, device_facts, write_report

VERSIONED = ("jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers")
EXAMPLES = """examples:
  python -m medusa_jax bench questions --questions question.jsonl --limit 0 --max_new_tokens 1024
  python -m medusa_jax bench questions --model smollm2 --drafters hydrapp --trees 8 \\
      --questions mt_bench.jsonl --limit 16
"""
COLUMNS: dict[str, Cell] = {
    "drafter": "{label}",
    "nodes": "{tree_nodes}",
    "category": "{category}",
    "turns": "{texts}",
    "mean accepted length": "{mean_accepted_length:.2f}",
    "step latency": "{step_latency_ratio:.2f}x",
    "speed-up": "{speedup:.2f}x",
    "off length / latency": "{difference:+z.1%}",
    "diverged": "{divergences} of {texts}",
    "prompts cut": "{cut}",
}


@dataclass(frozen=True, kw_only=True)
class Flags(TreeFlags):
    """Answer a question file."""


def run(flags: Flags) -> int:
    """Answer the file with every drafter and tree, print the table, write the files."""
    from medusa_jax.evaluate.answers import write_answers
    from medusa_jax.evaluate.conversation import ending_turns, find_template
    from medusa_jax.evaluate.race import rows_of, timed_runs
    from medusa_jax.evaluate.recording import answered_turns

    questions = questions_of(flags, flags.model)
    out, options = out_directory(flags.out), generation_options(flags)
    entrants = list(load_entrants(flags, names_of(flags), flags.trees))
    model = entrants[0].model
    template = find_template(model, flags.chat_template)
    options = ending_turns(model, options, template)
    room = prompt_room(flags, model.config.max_position, flags.max_new_tokens)
    turns = answered_turns(model, questions, template, room, options)
    prompts, numbers = [t.prompt for t in turns], [t.number for t in turns]
    contenders = contenders_of(entrants, options)
    runs = timed_runs(contenders, prompts, flags.repeats)
    for contender, own in zip(contenders, runs):
        name = f"{contender.label}-{contender.facts['tree_nodes']}"
        write_answers(out, name, questions, numbers, own)
    rows = []
    for category, group in grouped([questions[i]["category"] for i in numbers]).items():
        cut = sum(turns[i].cut for i in group)
        of_group = [[own[i] for i in group] for own in runs]
        found = rows_of(contenders, of_group, [prompts[i] for i in group])
        rows += [{"category": category, "cut": cut} | row for row in found[1:]]
    file = flags.questions or flags.prompts
    facts = device_facts() | {
        "dtype": str(model.dtype),
        "versions": {
            "python": platform.python_version(),
            "medusa-jax": medusa_jax.__version__,
            **{name: version(name) for name in VERSIONED},
        },
        "questions": file,
        "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest(),
        "options": asdict(flags),
        "rows": rows,
    }
    notes = f"{facts['device']}, {facts['dtype']}, jax {version('jax')}, {facts['date']}"
    write_report(out, "results", facts, rows, COLUMNS, notes)
    return 0


main = Program("python -m medusa_jax bench questions", Flags, run, EXAMPLES)
