"""The size of tree that pays most on this device: what `--tree auto` means.

A tree file says in which order nodes are worth adding and how many tokens a step gives with each
size; both belong to the heads. What a step costs belongs to the machine, so it is measured there:
at first use, size after size, and kept in the user's cache directory. Plain decoding is one of the
sizes: where no tree pays, none is used.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax

from medusa_jax.api.model import Model
from medusa_jax.console import announced, cache_directory, processor
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.timing import engine_seconds
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


def kept_size(file: Path) -> int | None:
    """The size that was measured to pay most, if it was."""
    try:
        return int(json.loads(file.read_text())["nodes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cache_file(calibrated: dict[str, Any], batch: int, *marks: Any) -> Path:
    """Where the choice for this device, model and batch size is kept.

    Args:
      marks: what else a step depends on.
    """
    device = jax.devices()[0]
    everything = [
        jax.__version__, device.platform, device.device_kind, os.cpu_count(), processor(),
        calibrated["growth"], calibrated["evidence"]["ladder"], batch, *map(repr, marks),
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:16]
    return Path(cache_directory("trees")) / f"{digest}.json"


def choose_on_device(
    model: Model, calibrated: dict[str, Any], batch: int, file: Path
) -> dict[str, Any]:
    """Measure steps of growing trees and choose; the choice is kept in `file`.

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
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found) + "\n")
    except OSError:
        pass  # measured again next time
    return found
