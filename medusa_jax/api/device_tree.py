"""`--tree auto`: the size of the tree that is fastest on this device, for a number of rows.

A tree file gives the best order in which to add nodes and the tokens per step of each size; both depend on
the heads. The cost of a step depends on the device and the number of rows. It is measured on first use, for
at most `measured.TREES` seconds, and saved in the user's cache directory. Plain decoding is one of the
sizes, so no tree is used where none is faster. `calibrate` measures without a time limit.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.api.model import Model
from medusa_jax.arch import STORED, HeadsConfig, LlamaConfig
from medusa_jax.decoding.timing import StepClock
from medusa_jax.errors import UserError
from medusa_jax.measured import TREES, DeviceCache, within
from medusa_jax.model.seams import cpu
from medusa_jax.model.stored import Storage
from medusa_jax.tree.files import (
    ACCELERATOR_NODES,
    auto_tree,
    file_ladder,
    order_of,
    tree_at,
    tree_of_size,
)
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json

# "bundled": use the tree file's choice and measure nothing.
VARIABLE = "MEDUSA_JAX_TREES"
# Steps of a timed run, tokens of the prompt.
STEPS, PROMPT = 4, 16
# Increase when `StepClock` changes, so that saved choices are measured again.
CLOCK = 2
# Rounds per size; sizes with fewer than LEAST are ignored.
ROUNDS, LEAST = 10, 3
# A larger tree must be faster by more than this, since two measurements may differ by as much.
MARGIN = 1.02
# Number of sizes to try on each side of the fastest.
REACH = 2
# After this many starts in which time ran out before any size was timed, save the first size. Each start gets
# further, since compiled programs are cached on disk.
TRIES = 3
# Most nodes of the first measured size if weights are narrow: further rows of a product then cost time.
FEW = 3

# A round: nodes of a tree, seconds of a step with it and of a plain one.
Round = tuple[int, float, float]


def tokens_by_size(calibrated: Json | None) -> dict[int, float]:
    """Tokens per step by number of nodes, smallest first, from the tree file's evidence.

    On an accelerator a step with 64 nodes costs little more than with one, so that size is added with the
    tokens per step of the largest size in the evidence.
    """
    ladder = ((calibrated or {}).get("evidence") or {}).get("ladder") or []
    most = len((calibrated or {}).get("growth", ())) + 1
    found = {row["nodes"]: row["tokens_per_step"] for row in ladder if row["nodes"] <= most}
    if found and jax.default_backend() != "cpu" and max(found) < ACCELERATOR_NODES <= most:
        found[ACCELERATOR_NODES] = found[max(found)]
    return found and {1: 1.0} | dict(sorted(found.items()))


def is_measured(calibrated: Json | None) -> TypeGuard[Json]:
    """Whether "auto" is measured: the tree file has evidence and measuring is not disabled.

    Not with several processes, which would choose different trees and run different programs.

    Raises:
      UserError: the variable has another value than "bundled".
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "bundled"):
        raise UserError(f"{VARIABLE} is bundled or not set, not {asked!r}")
    return asked == "" and jax.process_count() == 1 and bool(tokens_by_size(calibrated))


def kept_choices(
    calibrated: Json,
    config: LlamaConfig,
    heads: HeadsConfig,
    dtype: DTypeLike,
    storage: Storage,
    mesh: Mesh,
) -> DeviceCache:
    """This device's saved choices for these heads: number of rows -> result of `measure_rung`."""
    tree = (*order_of(calibrated), calibrated["evidence"]["ladder"], STEPS, PROMPT, CLOCK)
    forms, sizes = (storage, storage.of_drafts), tuple(mesh.shape.values())
    kernels = cpu().mark() if storage.panel else None
    return DeviceCache("trees", *tree, config, heads, str(dtype), forms, kernels, sizes)


def kept_trees(calibrated: Json, *marks: object) -> dict[int, Tree]:
    """Saved trees by number of rows; `marks` are the further arguments of `kept_choices`."""
    most, found = len(calibrated["growth"]) + 1, {}
    for rows, rung in kept_choices(calibrated, *marks).read().items():  # type: ignore[arg-type]
        nodes = rung.get("nodes") if isinstance(rung, dict) else None
        if type(nodes) is int and 1 <= nodes <= most:
            found[int(rows)] = tree_of_size(calibrated, nodes)
    return found


def _marks(model: Model) -> tuple[object, ...]:
    """The arguments of `kept_choices` after the tree file."""
    return model.config, model.drafter.heads, model.dtype, model.storage, model.mesh


def trees_by_rows(
    model: Model, sizes: Sequence[int], measured: bool = True
) -> dict[int, Tree]:
    """The tree for each number of rows: the fastest for one may be slow for eight.

    Args:
      measured: on first use, measure the fastest trees on this device, within `TREES` seconds in total, if
        the tree file has evidence; otherwise use the model's default trees.
    """
    calibrated = model.calibrated
    if not (measured and is_measured(calibrated)):
        return {rows: model.tree_at(rows) for rows in sizes}
    trees = kept_trees(calibrated, *_marks(model))
    until = time.monotonic() + TREES
    for rows in sizes:
        if rows not in trees:
            left = max(0.0, until - time.monotonic())
            nodes = measure_rung(model, calibrated, rows, left)["nodes"]
            trees[rows] = tree_of_size(calibrated, nodes)
    return {rows: trees[rows] for rows in sizes}


def measure_rung(
    model: Model,
    calibrated: Json,
    rows: int,
    limit: float | None = None,
    most_nodes: int | None = None,
) -> Json:
    """Measure which tree is fastest, and save it for this device unless `most_nodes` limits it.

    Args:
      rows: batch size.
      limit: seconds after which the sizes timed so far decide. If none was timed, use `first_size`, and save
        it after `TRIES` starts.
      most_nodes: larger trees are not tried.

    Returns: the fastest size as `nodes`, and figures by size as `rows`.
    """
    tokens = {
        size: n
        for size, n in tokens_by_size(calibrated).items()
        if size <= (most_nodes or size)
        and tree_of_size(calibrated, size).drafted.depth <= model.drafter.n_heads
    }
    timed: Iterable[Round] = (rounds := time_steps(model, calibrated, rows, tokens))
    if limit is not None:
        timed = within(limit, f"which tree is fastest for batch {rows}", rounds)
    found = figures(timed, tokens)
    rung = {"nodes": fastest(found), "batch": rows, "rows": found}
    kept = kept_choices(calibrated, *_marks(model))  # type: ignore[arg-type]
    notes = kept.read()
    note = rung
    if limit is not None and not found:
        rung["nodes"] = first_size(model, calibrated, rows)
        tries = 1 + (notes.get(str(rows)) or {}).get("tries", 0)
        note = rung if tries >= TRIES else {"tries": tries}
    if most_nodes is None:
        kept.write(notes | {str(rows): note})
    return rung


def first_size(model: Model, calibrated: Json, rows: int) -> int:
    """The size to measure first: the tree file's own choice, or `FEW` nodes where weights are narrow."""
    platform = jax.default_backend()
    ladder = file_ladder(calibrated, platform)
    tree = tree_at(ladder, rows) if ladder else auto_tree(calibrated, platform)
    narrow = model.storage.weights in (STORED, "int8")
    return min(tree.n_nodes, FEW) if narrow else tree.n_nodes


def time_steps(
    model: Model, calibrated: Json, rows: int, tokens: Mapping[int, float]
) -> Iterator[Round]:
    """Time steps with trees of the sizes in `tokens`, interleaved with plain ones.

    `first_size` comes first, then the sizes next to the fastest so far, `REACH` on each side.
    """
    sizes = list(tokens)
    engines = {n: model.engine(tree_of_size(calibrated, n)) for n in sizes}
    prompt = [min(1, model.config.vocab_size - 1)] * PROMPT
    clock = StepClock(
        list(engines.values()), model.variables, prompt, batch=rows, n_steps=STEPS
    )
    found: list[Round] = []
    tried, first = {1}, first_size(model, calibrated, rows)
    at = min(range(len(sizes)), key=lambda i: abs(sizes[i] - first))
    while untried := set(sizes[max(0, at - REACH) : at + REACH + 1]) - tried:
        size = min(sorted(untried), key=lambda n: abs(sizes.index(n) - at))
        tried.add(size)
        for _ in range(ROUNDS):
            plain = clock.seconds(engines[1])
            yield (
                1,
                plain,
                plain,
            )  # the caller may stop here, before compiling the tree's step
            found.append((size, clock.seconds(engines[size]), plain))
            yield found[-1]
        at = sizes.index(fastest(figures(found, tokens)))


def figures(timed: Iterable[Round], tokens: Mapping[int, float]) -> list[Json]:
    """Figures of each size that was timed often enough, smallest first.

    Other work on the machine comes in bursts and only adds time, so we take ratios within a round and use
    only the faster half of the rounds.

    Returns: rows with the median ratio, the speed-up, and `spread`: the difference between the quartiles
      of the ratios, as a share of the median.
    """
    rounds: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for size, own, plain in timed:
        rounds[size].append((own, plain))
    rows = []
    for size, pairs in sorted(rounds.items()):
        if size == 1 or len(pairs) < LEAST:
            continue
        quiet = sorted(pairs, key=sum)[: (len(pairs) + 1) // 2]
        low, ratio, high = np.quantile(
            [own / plain for own, plain in quiet], [0.25, 0.5, 0.75]
        )
        values = (tokens[size], ratio, tokens[size] / ratio, (high - low) / ratio)
        names = ("tokens_per_step", "step_latency_ratio", "speedup", "spread")
        rows.append(
            {"nodes": size} | dict(zip(names, (round(float(x), 4) for x in values)))
        )
    return rows


def fastest(rows: Sequence[Json]) -> int:
    """The fastest size; a larger one must beat smaller ones by more than `MARGIN`; 1 is plain decoding."""
    best, speedup = 1, 1.0
    for row in rows:
        if row["speedup"] > MARGIN * speedup:
            best, speedup = row["nodes"], row["speedup"]
    return best
