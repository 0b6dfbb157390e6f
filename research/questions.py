"""`python -m research questions`: a published question file, all turns, by category and overall.

Writes a table, a JSON file of all figures and the answers in Spec-Bench's JSONL format. Prompts of
later turns contain plain decoding's answers to the earlier ones.
"""

import hashlib
import json
import platform
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import medusa_jax
from medusa_jax.commands.bench import (
    TreeFlags,
    contenders_of,
    load_entrants,
    names_of,
    out_directory,
)
from medusa_jax.commands.flags import Program
from medusa_jax.commands.model_flags import generation_options
from medusa_jax.evaluate.race import Run
from medusa_jax.evaluate.tables import Cell, device_facts, write_report
from medusa_jax.whole_files import Json, write_text
from research.asking import PromptFlags, prompt_room, questions_of
from research.turns import answered_turns, grouped

VERSIONED = ("jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers")
EXAMPLES = """examples:
  python -m research questions --questions question.jsonl --limit 0 --max_new_tokens 1024
  python -m research questions --model smollm2 --drafters hydrapp --trees 8 \\
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
class Flags(PromptFlags, TreeFlags):
    """Answer a question file."""


def run(flags: Flags) -> int:
    """Answer the file with every drafter and tree, print the table, write the files."""
    from medusa_jax.api.asking import ending_turns
    from medusa_jax.evaluate.race import rows_of, timed_runs
    from research.asking import find_template

    questions = questions_of(flags, flags.model)
    out, options = out_directory(flags.out), generation_options(flags)
    entrants = list(load_entrants(flags, names_of(flags), flags.trees))
    model = entrants[0].model
    template = find_template(model, flags.chat_template)
    options = ending_turns(model.tokenizer, model.eos_ids, options, template)
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


def answer_line(question: Json, turns: Sequence[Run], name: str) -> Json:
    """One line of Spec-Bench's answer files, which MT-bench's judges read as well.

    `wall_time` covers prefill and decoding, as in Spec-Bench; `new_tokens` includes the first token,
    which comes from prefill, and the end-of-text token; a step appends its accepted drafts and one more.

    Args:
      turns: a run of this engine for each turn.
    """
    results = [run.results[0] for run in turns]
    choice = {
        "index": 0,
        "turns": [result.text.strip() for result in results],
        "decoding_steps": [result.steps for result in results],
        "new_tokens": [result.new_tokens for result in results],
        "wall_time": [run.prefill_seconds + run.decode_seconds for run in turns],
        "accept_lengths": [n for result in results for n in result.accepted_lengths],
    }
    known = f"{name}/{question['question_id']}"
    return {
        "question_id": question["question_id"],
        "category": question["category"],
        "answer_id": uuid.uuid5(uuid.NAMESPACE_URL, known).hex,
        "model_id": name,
        "choices": [choice],
        "tstamp": time.time(),
    }


def write_answers(
    out: Path,
    name: str,
    questions: Sequence[Json],
    numbers: Sequence[int],
    runs: Sequence[Run],
) -> None:
    """Write NAME.jsonl.

    Args:
      numbers: the question of each run; a question's turns are in order.
    """
    of_question: dict[int, list[Run]] = {}
    for number, run in zip(numbers, runs, strict=True):
        of_question.setdefault(number, []).append(run)
    lines = [answer_line(questions[i], own, name) for i, own in sorted(of_question.items())]
    write_text(out / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


main = Program("python -m research questions", Flags, run, EXAMPLES)
