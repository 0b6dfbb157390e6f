"""`python -m research constrained`: constrained decoding of SmolLM2 with drafts and without.

Prints tokens per step and tokens/s of the same prompts with a schema and without, and how long the
device waits for the host in a constrained step: from the next tree's drafts to the launch of the pass
over it. Of the launch its processor time counts, since the pass takes the host's core once it runs.
"""

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax

from medusa_jax.api import Model, Options, load
from medusa_jax.commands.bench import out_directory
from medusa_jax.commands.flags import Program, at_least, flag
from medusa_jax.constraints.guide import MatcherGuide
from medusa_jax.decoding import constrained
from medusa_jax.evaluate.race import Contender, ourselves, race
from medusa_jax.evaluate.tables import Cell, device_facts, write_report
from medusa_jax.text.chat import encode_prompt
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json

PROMPTS = (
    "Write a record of a person as JSON.",
    "Give me a JSON record of a famous painter.",
    "Describe a fictional teacher from Spain as JSON with name, age, city, hobbies, married and job.",
    "Make up a nurse called Ann. Answer in JSON.",
)
WORD = {"type": "string", "maxLength": 30}


def closed(**properties: Json) -> Json:
    """The schema of an object with exactly these properties."""
    names = list(properties)
    rest = {"required": names, "additionalProperties": False}
    return {"type": "object", "properties": properties, **rest}


SCHEMA = closed(
    name=WORD,
    age={"type": "integer", "minimum": 0, "maximum": 120},
    city=WORD,
    hobbies={"type": "array", "items": {**WORD, "maxLength": 20}, "minItems": 2, "maxItems": 4},
    married={"type": "boolean"},
    job=closed(title=WORD, salary={"type": "integer"}),
)  # fmt: skip
COLUMNS: dict[str, Cell] = {
    "constraint, drafts": "{label}",
    "tokens/s": "{tokens_per_second:.0f}",
    "tokens per step": "{mean_accepted_length:.2f}",
    "step, ms": lambda r: f"{1e3 * r['step_seconds']:.1f}",
}
EXAMPLES = """examples:
  python -m research constrained
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Time constrained decoding, and how long the device waits in it."""

    model: str = flag("a chat model by name, or a directory", "smollm2")
    temperature: float = flag("0: greedy", 0.0)
    max_new_tokens: int = flag("limit of an answer", 160, type=at_least(1))
    repeats: int = flag("timed rounds", 3, type=at_least(1))
    out: str = flag("directory for results", "work/bench")


def contenders(model: Model, free: Options, bound: Options) -> list[Contender]:
    """Plain and drafted decoding without the schema, with it, and with its forbidden drafts kept."""
    plain, tree = Tree.none(), model.tree
    rows = [
        ourselves(model, plain, free, label="none, plain"),
        ourselves(model, tree, free, label="none, bundled tree"),
        ourselves(model, plain, bound, label="schema, plain"),
        ourselves(model, tree, bound, label="schema, bundled tree", against=2),
    ]
    kept = mock.patch.object(MatcherGuide, "replace_forbidden", lambda *_: None)
    last = dataclasses.replace(
        rows[-1], label="schema, forbidden drafts stay", decode=kept(rows[-1].decode)
    )
    return [*rows, last]


@contextmanager
def waiting() -> Iterator[list[float]]:
    """Seconds that the device waits for the host, one entry for each constrained step."""
    waits: list[float] = []
    look, verify = constrained.look_ahead, constrained.verify_nodes
    drafted = [0.0]
    with ThreadPoolExecutor(1) as watch:
        watching: Future[None] | None = None

        def wait_for(ahead: Any) -> None:
            jax.block_until_ready(ahead)
            drafted[0] = time.perf_counter()

        def timed_look(*given: Any) -> Any:
            nonlocal watching
            ahead = look(*given)
            watching = watch.submit(wait_for, ahead)
            return ahead

        def timed_verify(*given: Any) -> Any:
            assert watching
            watching.result()
            walk, start = time.perf_counter() - drafted[0], time.thread_time()
            verified = verify(*given)
            waits.append(walk + time.thread_time() - start)
            return verified

        with (
            mock.patch.object(constrained, "look_ahead", timed_look),
            mock.patch.object(constrained, "verify_nodes", timed_verify),
        ):
            yield waits


def run(flags: Flags) -> int:
    """Measure, print, write the files."""
    out = out_directory(flags.out)
    model = load(flags.model, tree="bundled")
    free = Options(max_new_tokens=flags.max_new_tokens, temperature=flags.temperature)
    bound = dataclasses.replace(free, constraint={"json_schema": SCHEMA})
    messages = [[{"role": "user", "content": text}] for text in PROMPTS]
    prompts = [encode_prompt(model.tokenizer, turn) for turn in messages]
    rows = race(contenders(model, free, bound), prompts, flags.repeats)
    with waiting() as waits:
        seconds = sum(
            model.generate([p], bound, tree=model.tree)[0].decode_seconds for p in prompts
        )
    wait, share = sum(waits) / len(waits), sum(waits) / seconds
    facts = device_facts() | {"rows": rows, "wait_seconds": wait, "wait_share": share}
    notes = f"the device waits {1e3 * wait:.2f} ms of a drafted step with the schema, {share:.1%}"
    write_report(out, "constrained", facts, rows, COLUMNS, notes)
    return 0


main = Program("python -m research constrained", Flags, run, EXAMPLES)
