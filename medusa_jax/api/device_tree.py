"""The fastest size of tree on this device for a number of rows: what `--tree auto` means.

A tree file gives the order in which nodes are worth adding and the tokens per step of each size; both
belong to the heads. What a step costs belongs to the machine and to the number of rows, so it is
measured there: once, in at most `measured.TREES` seconds, and kept in the user's cache directory. Plain
decoding is one of the sizes: where no tree is faster, none is used. The choices for several numbers
of rows are a ladder (`tree/ladder.py`); `calibrate` measures one without a limit of time and writes it
into the tree file too.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh

from medusa_jax.api.model import Model
from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.decoding.timing import StepClock
from medusa_jax.errors import UserError
from medusa_jax.measured import NEVER, TREES, DeviceCache, in_rounds, within
from medusa_jax.model.stored import Storage
from medusa_jax.tree import Ladder, Tree, file_ladder, tree_of_size
from medusa_jax.tree.files import ACCELERATOR_NODES, auto_tree

# "bundled": the file's own choice is taken and nothing is measured.
VARIABLE = "MEDUSA_JAX_TREES"
# Steps of a timed run, tokens of the prompt.
STEPS, PROMPT = 4, 16
# Rounds of a size; with fewer than LEAST it does not count.
ROUNDS, LEAST = 10, 3
# A larger tree must be faster by more than this, which two measurements may differ by.
MARGIN = 1.02
# Sizes that are tried on each side of the fastest.
REACH = 2
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
    """Whether "auto" is measured: the tree file has evidence and measuring is not disabled.

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
) -> DeviceCache:
    """Where the choice for this device, model and batch size is kept."""
    tree = (calibrated["growth"], calibrated["evidence"]["ladder"], STEPS, PROMPT)
    sizes = tuple(mesh.shape.values())
    forms = (storage, storage.of_drafts)
    return DeviceCache("trees", *tree, batch, config, heads, str(dtype), forms, sizes)


def kept_for(model: Model, calibrated: dict[str, Any], rows: int) -> DeviceCache:
    """`kept_choice` of a loaded model."""
    marks = (model.drafter.heads, model.dtype, model.storage, model.mesh)
    return kept_choice(calibrated, rows, model.config, *marks)


def measure_rung(
    model: Model,
    calibrated: dict[str, Any],
    rows: int,
    most_nodes: int | None = None,
    out: list[dict[str, Any]] | None = None,
    over: threading.Event = NEVER,
) -> dict[str, Any]:
    """Time steps of trees in turn with plain decoding, and choose the fastest size.

    The tree file's choice comes first, then the sizes next to the fastest so far, `REACH` on each side.

    Args:
      rows: decoded at a time.
      most_nodes: larger trees are not tried.
      out: gets the `figures` of a size as soon as it was timed.
      over: no further round is timed once it is set.

    Returns: `nodes`, the choice; `batch`; and `rows`, the figures by size.
    """
    found = [] if out is None else out
    tokens = tokens_by_size(calibrated, jax.default_backend())
    engines = {
        size: model.engine(tree)
        for size in tokens
        if size <= (most_nodes or size)
        and (tree := tree_of_size(calibrated["growth"], size)).drafted.depth
        <= model.drafter.n_heads
    }
    sizes = list(engines)
    prompt = [min(1, model.config.vocab_size - 1)] * PROMPT
    clock = StepClock(
        list(engines.values()), model.variables, prompt, batch=rows, n_steps=STEPS
    )
    clock.seconds(engines[1])  # compile
    tried = {1}
    first = file_tree(calibrated, rows).n_nodes
    at = min(range(len(sizes)), key=lambda i: abs(sizes[i] - first))
    while not over.is_set():
        near = range(max(0, at - REACH), min(len(sizes), at + REACH + 1))
        untried = [i for i in near if sizes[i] not in tried]
        if not untried:
            break
        size = sizes[min(untried, key=lambda i: abs(i - at))]
        tried.add(size)
        clock.seconds(engines[size])
        runs = [partial(clock.seconds, engines[n]) for n in (1, size)]
        pairs = list(in_rounds(runs, ROUNDS, over))
        if len(pairs) >= LEAST:
            found.append(figures(size, tokens[size], pairs))
        at = sizes.index(fastest(found))
    rungs = sorted(found, key=lambda row: row["nodes"])
    return {"nodes": fastest(found), "batch": rows, "rows": rungs}


def figures(size: int, tokens: float, pairs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A size's figures from rounds: seconds of plain decoding and of this size.

    Other work on a machine comes in bursts and only ever adds. So ratios are taken within a round,
    and only the quieter half of the rounds counts.

    Returns: the median ratio, the speed-up, and `spread`, which is between the quartiles of the
      ratios, as a share of the median.
    """
    quiet = sorted(pairs, key=sum)[: (len(pairs) + 1) // 2]
    low, ratio, high = np.quantile([own / plain for plain, own in quiet], [0.25, 0.5, 0.75])
    found = {
        "tokens_per_step": tokens,
        "step_latency_ratio": ratio,
        "speedup": tokens / ratio,
        "spread": (high - low) / ratio,
    }
    return {"nodes": size} | {name: round(float(x), 4) for name, x in found.items()}


def interpolated(
    timed: Sequence[Mapping[str, Any]], tokens: Mapping[int, float]
) -> list[dict[str, Any]]:
    """Figures of the sizes that were not timed, below the largest that was.

    Step latency is taken as linear in the nodes between two timed sizes.

    Example: a step over 8 nodes takes 2.6 plain steps, so one over 2 takes 1 + 1.6 / 7 = 1.23.
    """
    known = {1: 1.0} | {row["nodes"]: row["step_latency_ratio"] for row in timed}
    nodes = sorted(known)
    found = []
    for size, n in tokens.items():
        if size not in known and size < nodes[-1]:
            ratio = float(np.interp(size, nodes, [known[x] for x in nodes]))
            found.append({"nodes": size, "step_latency_ratio": ratio, "speedup": n / ratio})
    return found


def fastest(rows: Sequence[Mapping[str, Any]]) -> int:
    """The nodes of the size that none beats by more than `MARGIN`, small ones first; 1: plain decoding."""
    best = {"nodes": 1, "speedup": 1.0}
    for row in sorted(rows, key=lambda row: row["nodes"]):
        if row["speedup"] > MARGIN * best["speedup"]:
            best = dict(row)
    return int(best["nodes"])


def file_tree(calibrated: dict[str, Any], rows: int) -> Tree:
    """The tree file's own choice for this number of rows."""
    platform = jax.default_backend()
    ladder = file_ladder(calibrated, platform)
    return ladder.at(rows) if ladder else auto_tree(calibrated, platform)


def measure_and_keep(model: Model, calibrated: dict[str, Any], rows: int) -> dict[str, Any]:
    """`measure_rung`, whatever was kept before; its choice is this device's from now on."""
    found = measure_rung(model, calibrated, rows)
    kept_for(model, calibrated, rows).write(found)
    return found


def known_ladder(calibrated: dict[str, Any], *marks: Any) -> Ladder | None:
    """What is known without measuring: choices kept on this device, else the tree file's own.

    Args:
      marks: what else `kept_choice` takes, after the number of rows.
    """
    ladder = file_ladder(calibrated, jax.default_backend())
    for rows in ROWS:
        size = kept_choice(calibrated, rows, *marks).read("nodes", int)
        if size is not None:
            tree = tree_of_size(calibrated["growth"], size)
            ladder = (ladder or Ladder({})).having(rows, tree)
    return ladder


def measured_ladder(
    model: Model, calibrated: dict[str, Any], sizes: Sequence[int]
) -> Ladder:
    """A rung for each number of rows, measured on this device at first use: all in `TREES` seconds.

    What was timed in time decides, with sizes in between interpolated; else the tree file's choice. It is kept
    however noisy the machine.
    """
    rungs, until = {}, time.perf_counter() + TREES
    for rows in sizes:
        kept = kept_for(model, calibrated, rows)
        size = kept.read("nodes", int)
        if size is None:
            found: list[dict[str, Any]] = []
            measure = partial(measure_rung, model, calibrated, rows, out=found)
            if (left := until - time.perf_counter()) > 0:
                within(left, f"which tree is fastest for batch {rows}", measure)
            timed = list(found)
            tokens = tokens_by_size(calibrated, jax.default_backend())
            size = (
                fastest([*timed, *interpolated(timed, tokens)])
                if timed
                else file_tree(calibrated, rows).n_nodes
            )
            kept.write({"nodes": size, "batch": rows, "rows": timed})
        rungs[rows] = tree_of_size(calibrated["growth"], size)
    return Ladder(rungs)
