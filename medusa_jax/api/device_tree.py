"""The fastest size of tree on this device for a number of rows: what `--tree auto` means.

A tree file gives the order in which nodes are worth adding and the tokens per step of each size; both
belong to the heads. The cost of a step depends on the machine and the number of rows, so it is measured
there: once, in at most `measured.TREES` seconds, and kept in the user's cache directory. Plain decoding is
one of the sizes: where no tree is faster, none is used. The choices for several numbers of rows are a
ladder (`tree/ladder.py`); `calibrate` measures one without a time limit and also writes it into the tree
file.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.api.model import Model
from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.decoding.timing import StepClock
from medusa_jax.errors import UserError
from medusa_jax.measured import TREES, DeviceCache, within
from medusa_jax.model.stored import Storage
from medusa_jax.tree import Ladder, Tree, file_ladder, tree_of_size
from medusa_jax.tree.files import ACCELERATOR_NODES, auto_tree
from medusa_jax.whole_files import Json

# "bundled": the file's own choice is used and nothing is measured.
VARIABLE = "MEDUSA_JAX_TREES"
# Steps of a timed run, tokens of the prompt.
STEPS, PROMPT = 4, 16
# Rounds of a size; with fewer than LEAST it does not count.
ROUNDS, LEAST = 10, 3
# A larger tree must be faster by more than this, since two measurements may differ by as much.
MARGIN = 1.02
# Sizes that are tried on each side of the fastest.
REACH = 2

# Nodes, and seconds of a step with them; a size follows the plain step (1 node) of the same round.
Timing = tuple[int, float]


def tokens_by_size(calibrated: Json | None, platform: str) -> dict[int, float]:
    """Tokens per step by number of nodes, smallest first, as the tree file's evidence has them.

    On an accelerator, where a step with 64 nodes costs little more than with one, that size counts with
    the tokens of the largest one in the evidence.
    """
    ladder = ((calibrated or {}).get("evidence") or {}).get("ladder") or []
    growth = len((calibrated or {}).get("growth", ()))
    found = {row["nodes"]: row["tokens_per_step"] for row in ladder}
    found = {size: n for size, n in sorted(found.items()) if size <= growth + 1}
    if found and platform != "cpu" and max(found) < ACCELERATOR_NODES <= growth + 1:
        found[ACCELERATOR_NODES] = found[max(found)]
    return found and {1: 1.0} | found


def is_measured(calibrated: Json | None) -> TypeGuard[Json]:
    """Whether "auto" is measured: the tree file has evidence and measuring is not disabled.

    Several processes would choose different trees, and their programs would not fit together.

    Raises:
      UserError: the variable has another value than "bundled".
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "bundled"):
        raise UserError(f"{VARIABLE} is bundled or not set, not {asked!r}")
    if asked == "bundled" or jax.process_count() > 1:
        return False
    return bool(tokens_by_size(calibrated, jax.default_backend()))


def kept_choices(
    calibrated: Json,
    config: LlamaConfig,
    heads: HeadsConfig,
    dtype: DTypeLike,
    storage: Storage,
    mesh: Mesh,
) -> DeviceCache:
    """The note of this device's choices for these heads: number of rows -> `rung`."""
    tree = (calibrated["growth"], calibrated["evidence"]["ladder"], STEPS, PROMPT)
    forms, sizes = (storage, storage.of_drafts), tuple(mesh.shape.values())
    return DeviceCache("trees", *tree, config, heads, str(dtype), forms, sizes)


def kept_for(model: Model, calibrated: Json) -> DeviceCache:
    """`kept_choices` of a loaded model."""
    marks = (model.drafter.heads, model.dtype, model.storage, model.mesh)
    return kept_choices(calibrated, model.config, *marks)


def kept_trees(kept: DeviceCache, calibrated: Json) -> dict[int, Tree]:
    """The trees of a note by number of rows, without damaged entries."""
    growth, found = calibrated["growth"], {}
    for rows, rung in kept.read().items():
        nodes = rung.get("nodes") if isinstance(rung, dict) else None
        if rows.isdecimal() and type(nodes) is int and 1 <= nodes <= len(growth) + 1:
            found[int(rows)] = tree_of_size(growth, nodes)
    return found


def timings(
    model: Model, calibrated: Json, rows: int, most_nodes: int | None = None
) -> Iterator[Timing]:
    """Time steps with trees, interleaved with plain ones.

    The tree file's choice comes first, then the sizes next to the fastest so far, `REACH` on each side.

    Args:
      rows: batch size.
      most_nodes: larger trees are not tried.
    """
    tokens = tokens_by_size(calibrated, jax.default_backend())
    engines = {
        size: model.engine(tree)
        for size in tokens
        if size <= (most_nodes or size)
        and (tree := tree_of_size(calibrated["growth"], size)).drafted.depth
        <= model.drafter.n_heads
    }
    prompt = [min(1, model.config.vocab_size - 1)] * PROMPT
    clock = StepClock(
        list(engines.values()), model.variables, prompt, batch=rows, n_steps=STEPS
    )
    found: list[Timing] = []
    sizes, tried, first = list(engines), {1}, file_tree(calibrated, rows).n_nodes
    at = min(range(len(sizes)), key=lambda i: abs(sizes[i] - first))
    while untried := [
        i
        for i in range(max(0, at - REACH), min(len(sizes), at + REACH + 1))
        if sizes[i] not in tried
    ]:
        size = sizes[min(untried, key=lambda i: abs(i - at))]
        tried.add(size)
        for nodes in (1, size) * ROUNDS:
            found.append((nodes, clock.seconds(engines[nodes])))
            yield found[-1]
        at = sizes.index(fastest(figures(found, tokens)))


def figures(timed: Iterable[Timing], tokens: Mapping[int, float]) -> list[Json]:
    """Figures of each size that was timed often enough, smallest first.

    Other work on a machine comes in bursts and only adds time. So ratios are taken within a round, and
    only the quieter half of the rounds counts.

    Returns: rows with the median ratio, the speed-up, and `spread`: the difference between the quartiles
      of the ratios, as a share of the median.
    """
    rounds: dict[int, list[tuple[float, float]]] = {}
    for size, seconds in timed:
        if size == 1:
            plain = seconds
        else:
            rounds.setdefault(size, []).append((seconds, plain))
    rows = []
    for size, pairs in sorted(rounds.items()):
        if len(pairs) < LEAST:
            continue
        quiet = sorted(pairs, key=sum)[: (len(pairs) + 1) // 2]
        low, ratio, high = np.quantile([s / plain for s, plain in quiet], [0.25, 0.5, 0.75])
        row = {
            "tokens_per_step": tokens[size],
            "step_latency_ratio": ratio,
            "speedup": tokens[size] / ratio,
            "spread": (high - low) / ratio,
        }
        rows.append({"nodes": size} | {name: round(float(x), 4) for name, x in row.items()})
    return rows


def interpolated(timed: Sequence[Json], tokens: Mapping[int, float]) -> list[Json]:
    """Figures of the sizes that were not timed, below the largest that was.

    Step latency is taken as linear in the nodes between two timed sizes.

    Example: a step over 8 nodes takes 2.6 plain steps, so one over 2 takes 1 + 1.6 / 7 = 1.23.
    """
    known = {1: 1.0} | {row["nodes"]: row["step_latency_ratio"] for row in timed}
    nodes, found = sorted(known), []
    for size, n in tokens.items():
        if size not in known and size < nodes[-1]:
            ratio = float(np.interp(size, nodes, [known[x] for x in nodes]))
            found.append({"nodes": size, "step_latency_ratio": ratio, "speedup": n / ratio})
    return found


def fastest(rows: Iterable[Json]) -> int:
    """The size that none beats by more than `MARGIN`, small ones first; 1 is plain decoding."""
    best: Json = {"nodes": 1, "speedup": 1.0}
    for row in sorted(rows, key=lambda row: row["nodes"]):
        if row["speedup"] > MARGIN * best["speedup"]:
            best = row
    return int(best["nodes"])


def file_tree(calibrated: Json, rows: int) -> Tree:
    """The tree file's own choice for this number of rows."""
    platform = jax.default_backend()
    ladder = file_ladder(calibrated, platform)
    return ladder.at(rows) if ladder else auto_tree(calibrated, platform)


def measure_rung(
    model: Model, calibrated: Json, rows: int, most_nodes: int | None = None
) -> Json:
    """Measure without a time limit: the fastest size as `nodes`, and figures by size as `rows`."""
    tokens = tokens_by_size(calibrated, jax.default_backend())
    found = figures(timings(model, calibrated, rows, most_nodes), tokens)
    return {"nodes": fastest(found), "batch": rows, "rows": found}


def measure_and_keep(model: Model, calibrated: Json, rows: int) -> Json:
    """`measure_rung`, whatever was kept before; its choice is kept for this device."""
    found, kept = measure_rung(model, calibrated, rows), kept_for(model, calibrated)
    kept.write(kept.read() | {str(rows): found})
    return found


def measured_ladder(model: Model, calibrated: Json, sizes: Sequence[int]) -> Ladder:
    """A rung for each number of rows, measured on this device at first use: all in `TREES` seconds.

    The sizes timed by then decide, with those in between interpolated; without any, the tree file's
    choice is used. It is kept, however busy the machine was.
    """
    kept, until = kept_for(model, calibrated), time.monotonic() + TREES
    trees = kept_trees(kept, calibrated)
    tokens = tokens_by_size(calibrated, jax.default_backend())
    for rows in sizes:
        if rows in trees:
            continue
        timed: list[Timing] = []
        if (left := until - time.monotonic()) > 0:
            what = f"which tree is fastest for batch {rows}"
            timed = within(left, what, timings(model, calibrated, rows))
        found = figures(timed, tokens)
        if found:
            size = fastest([*found, *interpolated(found, tokens)])
            trees[rows] = tree_of_size(calibrated["growth"], size)
        else:
            trees[rows] = file_tree(calibrated, rows)
        rung = {"nodes": trees[rows].n_nodes, "batch": rows, "rows": found}
        kept.write(kept.read() | {str(rows): rung})
    return Ladder({rows: trees[rows] for rows in sizes})
