"""`python -m research cache_cost`: what a step costs at 64 tokens of context, by the cache's limit.

The cache grows with the text, so while the text is short a request that may fill 4096 slots should cost
the same as one of 128. For contrast, a `preallocated` step attends to all 4096 slots from the start.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from medusa_jax.commands.flags import ModelFlags, Program, flag, load_model
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import Cell, table_of

SMALL, LARGE, ROUNDS = 128, 4096, 15
# Slots that a request may fill, and slots of its cache from the start (0: grown with the text).
CASES = {
    "128": (SMALL, 0),
    "4096, grown with the text (this engine)": (LARGE, 0),
    "4096, preallocated (for contrast)": (LARGE, LARGE),
}
EXAMPLES = """examples:
  python -m research cache_cost
"""
COLUMNS: dict[str, Cell] = {
    "slots": "{case}",
    "step": lambda r: f"{1e3 * r['seconds']:.3f} ms",
    "bytes of a step": lambda r: f"{r['bytes'] / 1e6:.2f} MB",
    "step against 128": "{against_seconds:.3f}",
    "bytes against 128": "{against_bytes:.3f}",
}


@dataclass(frozen=True, kw_only=True)
class Flags(ModelFlags):
    """Steps by the cache's limit."""

    prompt: str = flag("repeated to 64 tokens", "def parse(")


def measure(model: Any, prompt: Sequence[int]) -> list[dict[str, Any]]:
    """Per case the median seconds of a step, and the bytes it accesses by XLA's cost analysis.

    Raises:
      UserError: the prompt leaves no step in 128 slots.
    """
    import jax
    import numpy as np

    from medusa_jax.decoding import generate as loop
    from medusa_jax.measured import in_rounds

    M, L = model.tree.n_nodes, model.tree.path_length
    n_steps = (SMALL - len(prompt) - M) // L
    if n_steps < 1:
        raise UserError(f"a prompt of {len(prompt)} tokens leaves no step in {SMALL} slots")
    engine, steps = loop.Engine(model.llama, model.drafter, model.tree), np.int32(n_steps)

    def start(needed: int, slots: int) -> Any:
        request = loop.Request(prompts=[list(prompt)], limits=[needed - len(prompt) - M])
        state, _ = loop.begin(engine, model.variables, request)
        return loop.grow(engine.depth_only, slots, state) if slots else state

    def run(needed: int, slots: int) -> float:
        state = jax.block_until_ready(start(needed, slots))
        began = time.perf_counter()
        _, progress = loop.decode_loop(engine, model.variables, state, steps)
        jax.block_until_ready(progress)
        return (time.perf_counter() - began) / n_steps

    rounds = list(in_rounds([partial(run, *case) for case in CASES.values()], 1 + ROUNDS))
    rows: list[dict[str, Any]] = []
    for case, seconds in zip(CASES, zip(*rounds[1:])):  # the first round compiles
        lowered = loop.decode_loop.lower(
            engine, model.variables, start(*CASES[case]), steps
        )
        row = {"case": case, "seconds": statistics.median(seconds)}
        row["bytes"] = float((lowered.compile().cost_analysis() or {})["bytes accessed"])
        rows.append(row)
        for name in ("seconds", "bytes"):
            row[f"against_{name}"] = row[name] / rows[0][name]
    return rows


def run(flags: Flags) -> int:
    """Measure and print the table."""
    model = load_model(flags)
    prompt = (model.encode(flags.prompt) * 64)[:64]
    print(table_of(measure(model, prompt), COLUMNS))
    return 0


main = Program("python -m research cache_cost", Flags, run, EXAMPLES)
