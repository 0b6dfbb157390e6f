"""The size of tree that pays most on this device for so many rows: what `--tree auto` means.

A tree file says in which order nodes are worth adding and how many tokens a step gives with each
size; both belong to the heads. What a step costs belongs to the machine and to the number of rows, so
it is measured there: at first use, size after size, and kept in the user's cache directory. Plain
decoding is one of the sizes: where no tree pays, none is used. The choices for several numbers of
rows are a ladder (`tree/ladder.py`); `calibrate` measures one and writes it into the tree file too.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh

from medusa_jax.api.model import Model
from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.console import announced
from medusa_jax.decoding.timing import engine_rounds
from medusa_jax.errors import UserError
from medusa_jax.measured import Kept
from medusa_jax.model.stored import Storage
from medusa_jax.tree import Ladder, file_ladder, tree_of_size
from medusa_jax.tree.files import ACCELERATOR_NODES

# "bundled": the file's own choice is taken and nothing is measured.
VARIABLE = "MEDUSA_JAX_TREES"
# A larger tree must be faster by more than that, which two measurements may differ by.
MARGIN = 1.02
# After so many sizes in a row that do not pay, larger ones are not tried.
PATIENCE = 2
# Tokens of the text that steps are timed behind.
PROMPT = 64
# Numbers of rows that have a rung.
ROWS = (1, 2, 4, 8, 16)


def tokens_by_size(calibrated: dict[str, Any] | None, platform: str) -> dict[int, float]:
    """Tokens per step by number of nodes, smallest first, as the tree file's evidence has them.

    On an accelerator, whose steps hardly tell 64 nodes from one, a size that the evidence does not
    reach counts with the tokens of the largest one that it does.
    """
    ladder = ((calibrated or {}).get("evidence") or {}).get("ladder") or []
    growth = len((calibrated or {}).get("growth", ()))
    found = {row["nodes"]: row["tokens_per_step"] for row in ladder}
    found = {size: n for size, n in sorted(found.items()) if size <= growth + 1}
    if found and platform != "cpu" and max(found) < ACCELERATOR_NODES <= growth + 1:
        found[ACCELERATOR_NODES] = found[max(found)]
    return found and {1: 1.0} | found


def is_measured(calibrated: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Whether "auto" is to be measured: the tree file says what each size gives, and nobody said no.

    Several processes would measure several choices, and run programs that do not go together.

    Raises:
      UserError: the variable says something else than "bundled".
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "bundled"):
        raise UserError(f"{VARIABLE} is bundled or not set, not {asked!r}")
    if asked == "bundled" or jax.process_count() > 1:
        return False
    return bool(tokens_by_size(calibrated, jax.default_backend()))


def kept_choice(
    calibrated: dict[str, Any],
    batch: int,
    config: LlamaConfig,
    heads: HeadsConfig,
    dtype: Any,
    storage: Storage,
    mesh: Mesh,
) -> Kept:
    """Where the choice for this device, model and batch size is kept."""
    tree = (calibrated["growth"], calibrated["evidence"]["ladder"])
    sizes = tuple(mesh.shape.values())
    forms = (storage, storage.of_drafts)
    return Kept("trees", *tree, batch, config, heads, str(dtype), forms, sizes)


def kept_size(kept: Kept) -> int | None:
    """The size that was measured to pay most, if it was."""
    size = kept.read().get("nodes")
    return size if type(size) is int else None


def choose_on_device(
    model: Model, calibrated: dict[str, Any], batch: int, kept: Kept
) -> dict[str, Any]:
    """`measure_rung`, and the choice is kept."""
    with announced("measuring which tree pays on this device, once"):
        found = measure_rung(model, calibrated, batch)
    kept.write(found)
    return found


def measure_rung(
    model: Model, calibrated: dict[str, Any], batch: int, most_nodes: int | None = None
) -> dict[str, Any]:
    """Measure steps of growing trees with so many rows, and choose.

    Args:
      most_nodes: larger trees are not tried.

    Returns: `nodes`, the choice, `batch`, and `rows`: for each size that was tried its nodes, tokens
      per step, step latency ratio and speed-up, both against plain decoding in the same run, and
      `spread`, how far the rounds' upper quartile lies above their least (a share of it).
    """
    tokens = tokens_by_size(calibrated, jax.default_backend())
    plain = model.engine(tree="none")
    rows: list[dict[str, Any]] = []
    best, lost = {"nodes": 1, "speedup": 1.0}, 0
    prompt = [min(1, model.config.vocab_size - 1)] * PROMPT
    for size in (s for s in tokens if 1 < s <= (most_nodes or s)):
        tree = tree_of_size(calibrated["growth"], size)
        if tree.depth > model.drafter.n_heads:
            break
        plain_rounds, rounds = engine_rounds(
            [plain, model.engine(tree)],
            model.variables,
            prompt,
            batch=batch,
            n_steps=8,
            rounds=15,
        )
        # The least: what else runs on the machine only ever adds, and the choice is kept.
        ratio = min(rounds) / min(plain_rounds)
        row = {
            "nodes": size,
            "tokens_per_step": tokens[size],
            "step_latency_ratio": round(ratio, 4),
            "speedup": round(tokens[size] / ratio, 4),
            "spread": round(max(spread(plain_rounds), spread(rounds)), 4),
        }
        rows.append(row)
        better = row["speedup"] > MARGIN * best["speedup"]
        best, lost = (row, 0) if better else (best, lost + 1)
        if lost == PATIENCE:
            break
    return {"nodes": best["nodes"], "batch": batch, "rows": rows}


def spread(rounds: Sequence[float]) -> float:
    """How far the upper quartile lies above the least, as a share of it."""
    return float(np.quantile(rounds, 0.75)) / min(rounds) - 1


def known_ladder(calibrated: dict[str, Any], *marks: Any) -> Ladder | None:
    """What is known without measuring: choices kept on this device, else the tree file's own.

    Args:
      marks: what else `kept_choice` takes, behind the number of rows.
    """
    ladder = file_ladder(calibrated, jax.default_backend())
    for rows in ROWS:
        size = kept_size(kept_choice(calibrated, rows, *marks))
        if size is not None:
            ladder = (ladder or Ladder({})).having(
                rows, tree_of_size(calibrated["growth"], size)
            )
    return ladder


def kept_for(model: Model, calibrated: dict[str, Any], rows: int) -> Kept:
    """`kept_choice` of a loaded model."""
    heads = model.drafter.heads
    marks = (model.config, heads, model.dtype, model.storage, model.mesh)
    return kept_choice(calibrated, rows, *marks)


def measured_ladder(
    model: Model, calibrated: dict[str, Any], sizes: Sequence[int]
) -> Ladder:
    """A rung for each number of rows, measured on this device at first use."""
    rungs = {}
    for rows in sizes:
        kept = kept_for(model, calibrated, rows)
        size = kept_size(kept)
        if size is None:
            size = choose_on_device(model, calibrated, rows, kept)["nodes"]
        rungs[rows] = tree_of_size(calibrated["growth"], size)
    return Ladder(rungs)
