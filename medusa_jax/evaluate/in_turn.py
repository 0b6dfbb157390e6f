"""Compare drafters: runs of all of them and of plain decoding, interleaved on every prompt.

Times taken minutes apart are not comparable on a shared machine.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from medusa_jax.api import Model, Options, Result
from medusa_jax.evaluate.speed import timed
from medusa_jax.tree import Tree

# Text length in tokens for the size of a drafter's state.
TEXT = 1024


@dataclass(frozen=True)
class Entrant:
    """A drafter in the comparison.

    Attributes:
      label: name in the table.
      model: the backbone with this drafter.
      tree: the tree that it drafts.
      trained_tokens: tokens over all its training steps; None if unknown.
    """

    label: str
    model: Model
    tree: Tree
    trained_tokens: int | None


def measure(
    entrants: Sequence[Entrant], prompts: Sequence[Any], options: Options, repeats: int
) -> list[dict[str, Any]]:
    """One row for each entrant, plain decoding first.

    A prompt's time is the median of its runs. Latency and speed-up are relative to plain decoding in
    the same run; `difference` is the relative error of speed-up = accepted length / step latency.
    """
    plain = Entrant("plain", entrants[0].model, Tree.none(), 0)
    entrants = [plain, *entrants]
    found: list[list[list[Result]]] = [[] for _ in entrants]  # by entrant, prompt, repeat
    for prompt in tqdm(prompts, desc="interleaved", unit="prompt", disable=None):
        for e in entrants:
            e.model.compile([prompt], options, tree=e.tree)
        rounds = [
            [e.model.generate([prompt], options, tree=e.tree)[0] for e in entrants]
            for _ in range(repeats)
        ]
        for runs, of_entrant in zip(zip(*rounds), found):
            of_entrant.append(list(runs))
    texts = [[runs[0].token_ids for runs in of_entrant] for of_entrant in found]
    totals = [total(of_entrant) for of_entrant in found]
    rows = []
    for e, own, text in zip(entrants, totals, texts):
        latency = (own["seconds"] / own["steps"]) / (
            totals[0]["seconds"] / totals[0]["steps"]
        )
        speedup = own["speed"] / totals[0]["speed"]
        accepted = own["tokens"] / own["steps"]
        rows.append(
            {
                "drafter": e.label,
                "tree_nodes": e.tree.n_nodes,
                "mean_accepted_length": accepted,
                "step_seconds": own["seconds"] / own["steps"],
                "step_latency_ratio": latency,
                "tokens_per_second": own["speed"],
                "speedup": speedup,
                "difference": speedup / (accepted / latency) - 1,
                "prompts": len(prompts),
                "divergences": sum(a != b for a, b in zip(text, texts[0])),
                "trained_tokens": e.trained_tokens,
                **memory(e),
            }
        )
    return rows


def total(by_prompt: Sequence[Sequence[Result]]) -> dict[str, float]:
    """Tokens after the first, steps, seconds and tokens per second over all prompts."""
    seconds = sum(statistics.median(r.decode_seconds for r in runs) for runs in by_prompt)
    tokens = timed(sum(runs[0].new_tokens - 1 for runs in by_prompt))
    steps = max(1, sum(runs[0].steps for runs in by_prompt))
    return {"tokens": tokens, "steps": steps, "seconds": seconds, "speed": tokens / seconds}


def memory(entrant: Entrant) -> dict[str, int]:
    """Bytes of the drafter: its parameters, and its state for one row of `TEXT` tokens."""
    if not entrant.tree.drafted.depth:
        return {"parameter_bytes": 0, "state_bytes": 0}
    model = entrant.model
    state = jax.eval_shape(lambda: model.drafter.start(1, TEXT, model.dtype))
    return {
        "parameter_bytes": sum(x.nbytes for x in jax.tree.leaves(model.variables["heads"])),
        "state_bytes": sum(
            int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)
        ),
    }


def trained_tokens(recipe: dict[str, Any]) -> int | None:
    """Training tokens according to the saved recipe; None if unknown.

    Includes the training of the heads that the run started from.
    """
    config = recipe.get("config", {})
    training = config.get("train", {})
    sizes = (
        recipe.get("step"),
        training.get("batch_size"),
        config.get("data", {}).get("seq_len"),
    )
    known = [n for n in sizes if isinstance(n, int)]
    if len(known) < len(sizes):
        return None
    own = math.prod(known)
    if not training.get("heads_path"):
        return own
    before = trained_tokens(recipe.get("start", {}))
    return None if before is None else before + own


def recipe_of(directory: str) -> dict[str, Any]:
    """Read the recipe that `train.py` saved next to a backbone; {} if there is none."""
    file = Path(directory) / "recipe.json"
    return dict(json.loads(file.read_text())) if file.is_file() else {}
