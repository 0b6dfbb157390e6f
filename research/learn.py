"""`python -m research learn`: what heads gain from a user's own answers.

A model answers prompts unlike the text that its heads were trained on (`learn_prompts.py`). The heads learn from these
answers as with `serve --learn`. Mean accepted lengths are replayed on later answers and on answers to a question file.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from medusa_jax.api import Model, Options, load
from medusa_jax.commands.flags import CommandLine, flag, numbers
from medusa_jax.console import inform
from medusa_jax.errors import one_of
from medusa_jax.evaluate.question_files import read_questions
from medusa_jax.evaluate.ranks import record
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.evaluate.texts import Text, answer_prompts
from medusa_jax.kept_programs import use_compilation_cache
from medusa_jax.learning.learner import Learner
from medusa_jax.sharding import Params
from medusa_jax.text.chat import encode_prompt
from medusa_jax.tree.growth import replay
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import write_json
from research.learn_prompts import SHIFTS, questions
from research.replay import order_for

EXAMPLES = """examples:
  python -m research learn --model smollm2 --questions mt_bench.jsonl
"""
# Answers held out, most tokens of a prompt and of an answer, nodes of the tree, none of them copied.
HELD_OUT, MOST_PROMPT, NEW, NODES = 28, 144, 112, 8
CHATS = 64
CHAT = "chat"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """What heads gain from a user's own answers."""

    model: str = flag("as for decode.py", "smollm2")
    questions: str = flag("a question file, such as MT-bench's", metavar="FILE")
    drafter: str = flag("name or directory of heads", "eagle")
    shifts: tuple[str, ...] = flag("comma-separated", SHIFTS)
    points: tuple[int, ...] = flag("answers seen, ascending", (20, 50, 100), type=numbers())
    out: str = flag("directory for the model's answers", "work/learn")


def learn(model: Model, texts: Sequence[Text], points: Sequence[int]) -> Iterator[Params]:
    """The heads that a server would have learned after `points` of these answers."""
    with TemporaryDirectory() as folder:
        learner = Learner(model, folder)
        work = learner.work()
        for n, text in enumerate(texts, 1):
            learner.add(text.prompt, text.answer)
            while next(work):  # until nothing is to be done
                pass
            if n in points:
                yield learner.adapter.adapted_heads()


def replayed(model: Model, heads: Params, texts: Sequence[Text], tree: Tree) -> np.ndarray:
    """Tokens and steps of a replay of each text with these heads [N, 2]."""
    loaded, model.variables = model.variables, model.variables | {"heads": heads}
    recorded = record(model, texts, Options())
    model.variables = loaded
    return np.array([replay([text], tree) for text in recorded])


def change(before_N2: np.ndarray, after_N2: np.ndarray) -> str:
    """Of the mean accepted length, and its standard error over texts (200 resamples)."""

    def of(rows: Any) -> float:
        (tokens, steps), (tokens_now, steps_now) = (
            counts[rows].sum(axis=0) for counts in (before_N2, after_N2)
        )
        return float(tokens_now / steps_now / (tokens / steps) - 1)

    draw, n = np.random.default_rng(0), len(before_N2)
    error = np.std([of(draw.integers(0, n, n)) for _ in range(200)])
    return f"{of(slice(None)):+.1%} ± {error:.1%}"


def answers(flags: Flags, model: Model) -> dict[str, list[Text]]:
    """The model's greedy answers by shift, and to the questions; kept in texts.json for the next call."""
    file = Path(flags.out) / "texts.json"
    saved = json.loads(file.read_text()) if file.exists() else {}
    options = Options(max_new_tokens=NEW)
    options = model.ending_turns(options, "")
    for shift in (*flags.shifts, CHAT):
        if shift not in saved:
            n = CHATS if shift == CHAT else flags.points[-1] + HELD_OUT
            if shift == CHAT:
                asked = [one["turns"][0] for one in read_questions(flags.questions)]
            else:
                asked = questions(shift, 2 * n)
            ids = [encode_prompt(model.tokenizer, text) for text in asked]
            ids = [prompt for prompt in ids if len(prompt) <= MOST_PROMPT][:n]
            inform(f"{shift}: answering {len(ids)} prompts")
            saved[shift] = answer_prompts(model, ids, options)
            write_json(file, saved, indent=None)
    return {shift: [Text(*fields) for fields in texts] for shift, texts in saved.items()}


def run(flags: Flags) -> int:
    """Answer, learn from every shift, and print the curves."""
    for shift in flags.shifts:
        one_of("--shifts", shift, SHIFTS)
    use_compilation_cache()
    Path(flags.out).mkdir(parents=True, exist_ok=True)
    model, last, rows = load(flags.model, flags.drafter), flags.points[-1], []
    tree = order_for(model, (), Options(), copies=False).tree(NODES)
    texts, loaded = answers(flags, model), model.variables["heads"]
    chat = replayed(model, loaded, texts[CHAT], tree)
    for shift in flags.shifts:
        seen, later = texts[shift][:last], texts[shift][last:]
        before = replayed(model, loaded, later, tree)
        tokens, steps = before.sum(axis=0)
        row = [shift, f"{tokens / steps:.2f}"]
        for heads in learn(model, seen, flags.points):
            row.append(change(before, replayed(model, heads, later, tree)))
            inform(f"{shift}: {row[-1]}")
        rows.append([*row, change(chat, replayed(model, heads, texts[CHAT], tree))])
    columns = ["shift", "before", *map(str, flags.points), CHAT]
    print(markdown_table(columns, rows))
    return 0


main = CommandLine("python -m research learn", Flags, run, EXAMPLES)
