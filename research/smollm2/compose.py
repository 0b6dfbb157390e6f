"""`python -m research compose`: questions composed of tasks and subjects, each with a follow-up.

Questions that a model writes (`distill --ask`) have little variety; people ask for letters, code, sums,
summaries and arguments, and then for changes to the answer. Every question is a random task with gaps, from
each kind of task in turn (`questions.json`), and the gaps are filled at random; a filling may have gaps itself. The
file is one of seeds for `medusa distill --prompts`.

Example: "Write a {form} about {subject}." -> "Write a limerick about beekeeping."
"""

import dataclasses
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from medusa_jax.commands.flags import CommandLine, at_least, flag
from medusa_jax.console import inform
from medusa_jax.whole_files import write_text

EXAMPLES = """examples:
  python -m research compose --n 8192 --out work/smollm2/questions.jsonl
"""

PARTS = json.loads(Path(__file__).with_name("questions.json").read_text())
# Gaps for further words from the same list, and for numbers.
WORDS: dict[str, list[str]] = PARTS["words"]
WORDS |= {f"sentence{i}": WORDS["sentence"] for i in range(2, 7)}
WORDS["german2"] = WORDS["german"]
NUMBERS = {"a": (2, 12), "b": (3, 20), "c": (2, 30), "big": (100, 900)}
WORDS |= {gap: [str(n) for n in range(a, b + 1)] for gap, (a, b) in NUMBERS.items()}


def filled(text: str, words: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """The text with its gaps filled at random, and the gaps of the fillings; `words` has those of each gap."""

    def fill(gap: re.Match[str]) -> str:
        return filled(rng.choice(words[gap[1]]), words, rng)

    return re.sub("{(" + "|".join(words) + ")}", fill, text)


def compose(number: int) -> tuple[str, str]:
    """The question of this number and its follow-up; deterministic."""
    kinds, rng = list(PARTS["tasks"].values()), random.Random(number)
    task = rng.choice(kinds[number % len(kinds)])
    texts = [filled(task, WORDS, rng), filled(rng.choice(PARTS["follow_ups"]), WORDS, rng)]
    question, follow_up = (text[0].upper() + text[1:] for text in texts)
    return question, follow_up


def composed(n: int, first: int = 0) -> list[tuple[str, str]]:
    """`n` different questions, starting with question `first`, each with its follow-up."""
    origins: dict[str, str] = {}
    number = first
    while len(origins) < n:
        question, follow_up = compose(number)
        origins.setdefault(question, follow_up)
        number += 1
    return list(origins.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Write questions, each with a follow-up, as seeds of a distillation."""

    n: int = flag("number of questions", 8192, type=at_least(1))
    first: int = flag("number of the first one", 0, type=at_least(0))
    out: str = flag("file to write", "work/smollm2/questions.jsonl")


def run(flags: Flags) -> int:
    """Write one line per question."""
    out = Path(flags.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"turns": turns}) for turns in composed(flags.n, flags.first)]
    write_text(out, "".join(line + "\n" for line in lines))
    inform(f"wrote {flags.n} questions to {out}")
    return 0


main = CommandLine("python -m research compose", Flags, run, EXAMPLES)
