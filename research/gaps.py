"""`python -m research gaps`: how long a stream waits for its next tokens while the heads learn.

A client asks, pauses and asks again, of a server that learns in the pauses (`serve --learn`) and of one that does not.
Gaps are the times between the pieces of an answer.
"""

import dataclasses
import time
from contextlib import nullcontext
from itertools import cycle
from tempfile import TemporaryDirectory

import numpy as np

from medusa_jax.api import Model, Options
from medusa_jax.commands.flags import CommandLine, at_least, flag
from medusa_jax.commands.model_flags import ModelFlags, load_model
from medusa_jax.console import inform
from medusa_jax.evaluate.prompt_files import read_prompts, record_prompts
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.kept_programs import use_compilation_cache
from medusa_jax.learning.learner import Learner
from research.clients import PROMPT, Call, Contender, ladder_of, served

# New tokens of an answer; seconds between answers.
NEW, PAUSE = 96, 0.6
COLUMNS = "server", "answers", "first token, median", "gap, median", "99th percentile", "most", "steps learned"  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ModelFlags):
    """How long a stream waits for its next tokens while the heads learn."""

    prompts: str = flag("questions, as for bench", "mt_bench.jsonl")
    seconds: float = flag("with each server", 60.0, type=at_least(1, float))


def pieces(asked: Contender, call: Call) -> np.ndarray:
    """Seconds after the request of each piece of its answer."""
    began = time.perf_counter()
    return np.array([time.perf_counter() - began for _ in asked.answer(call)])


def measure(
    model: Model, calls: list[Call], seconds: float, learner: Learner | None
) -> list[str]:
    """The table's row of a server."""
    firsts, gaps = list[float](), list[float]()
    with served(model, 1, NEW, PROMPT, learner) as (server, url):
        asked, began = Contender(url, ladder_of(server)), time.monotonic()
        for call in cycle(calls):
            first, *_ = times = pieces(asked, call)
            firsts.append(first)
            gaps += np.diff(times).tolist()
            if time.monotonic() - began > seconds:
                break
            time.sleep(PAUSE)
    typical, rare, most = np.quantile(gaps, (0.5, 0.99, 1.0))
    waits = [f"{1000 * s:.0f} ms" for s in (np.median(firsts), typical, rare, most)]
    steps = f"{learner.facts['steps']:.0f}" if learner else ""
    return ["learns" if learner else "does not", f"{len(firsts)}", *waits, steps]


def run(flags: Flags) -> int:
    """Print the table."""
    use_compilation_cache()
    model = load_model(flags, tree="auto")
    _, texts, _ = record_prompts(model, read_prompts(flags.prompts), Options())
    prompts = [ids for ids in map(model.encode, texts) if len(ids) <= PROMPT]
    calls = [(ids, NEW) for ids in prompts]
    rows = []
    for learns in (False, True):
        with TemporaryDirectory() if learns else nullcontext() as directory:
            learner = Learner(model, directory) if directory else None
            rows.append(measure(model, calls, flags.seconds, learner))
    inform("\n" + markdown_table(COLUMNS, rows))
    return 0


main = CommandLine("python -m research gaps", Flags, run)
