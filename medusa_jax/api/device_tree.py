"""The size of tree that pays most on this device: what `--tree auto` means.

A tree file says in which order nodes are worth adding and how many tokens a step gives with each
size; both belong to the heads. What a step costs belongs to the machine, so it is measured there:
at first use, size after size, and kept in the user's cache directory. Plain decoding is one of the
sizes: where no tree pays, none is used.
"""

import os
from typing import Any, TypeGuard

import jax
from jax.sharding import Mesh

from medusa_jax.api.model import Model
from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.console import announced
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.timing import engine_seconds
from medusa_jax.errors import UserError
from medusa_jax.measured import Kept
from medusa_jax.model.stored import Storage
from medusa_jax.tree import tree_of_size
from medusa_jax.tree.files import ACCELERATOR_NODES

# "bundled": the file's own choice is taken and nothing is measured.
VARIABLE = "MEDUSA_JAX_TREES"
# A larger tree must be faster by more than that, which two measurements may differ by.
MARGIN = 1.02
# After so many sizes in a row that do not pay, larger ones are not tried.
PATIENCE = 2
# Tokens of the text that steps are timed behind.
PROMPT = 64


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

    Raises:
      UserError: the variable says something else than "bundled".
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "bundled"):
        raise UserError(f"{VARIABLE} is bundled or not set, not {asked!r}")
    return bool(tokens_by_size(calibrated, jax.default_backend())) and asked != "bundled"


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
    """Measure steps of growing trees and choose; the choice is kept.

    Returns: `nodes`, the choice, and `rows`: for each size that was tried its nodes, tokens per
      step, step latency ratio and speed-up, both against plain decoding in the same run.
    """
    tokens = tokens_by_size(calibrated, jax.default_backend())
    plain = model.engine(tree="none")
    rows: list[dict[str, Any]] = []
    best, lost = {"nodes": 1, "speedup": 1.0}, 0
    prompt = [min(1, model.config.vocab_size - 1)] * PROMPT
    with announced("measuring which tree pays on this device, once"):
        for size in (s for s in tokens if s > 1):
            tree = tree_of_size(calibrated["growth"], size)
            if tree.depth > model.drafter.n_heads:
                break
            engine = Engine(model.llama, model.drafter, tree)
            # The least: what else runs on the machine only ever adds, and the choice is kept.
            seconds = engine_seconds(
                [plain, engine], model.variables, prompt, batch=batch, n_steps=8, rounds=15,
                of=min,
            )  # fmt: skip
            ratio = seconds[1] / seconds[0]
            row = {
                "nodes": size,
                "tokens_per_step": tokens[size],
                "step_latency_ratio": round(ratio, 4),
                "speedup": round(tokens[size] / ratio, 4),
            }
            rows.append(row)
            better = row["speedup"] > MARGIN * best["speedup"]
            best, lost = (row, 0) if better else (best, lost + 1)
            if lost == PATIENCE:
                break
    found = {"nodes": best["nodes"], "batch": batch, "rows": rows}
    kept.write(found)
    return found
