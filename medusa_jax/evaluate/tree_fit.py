"""Fit the tree to the heads and to this device (Medusa 2.3.3).

The ranks of the true tokens under the heads on the model's own output give the order of nodes, and the
tokens per step of the best tree of each size on held-out texts. Then, for each batch size, steps with
growing trees are timed until larger ones are clearly slower.
"""

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path

import jax
import numpy as np

from medusa_jax.api import Model, Options
from medusa_jax.api.prompts import Prompt
from medusa_jax.errors import UserError
from medusa_jax.evaluate.ranks import record
from medusa_jax.evaluate.step_clock import StepClock
from medusa_jax.evaluate.texts import ROWS, Text, answer_prompts
from medusa_jax.files.fingerprint import sample_bytes
from medusa_jax.progress import ProgressBar
from medusa_jax.tree import growth
from medusa_jax.tree.growth import TextRanks
from medusa_jax.tree.tree import Order, Tree
from medusa_jax.whole_files import Json, write_json

# Choices stored in a tree file, in order of worth: enough for trees of up to 128 nodes.
GROWTH = 127
# Default tree sizes. On a CPU each takes longer to compile than to time.
SIZES_TO_TIME = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
CPU_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Rounds per size, and steps of a timed run.
ROUNDS, STEPS = 7, 8
# A larger tree must be faster by more than this, since two measurements may differ by as much.
MARGIN = 1.02
# Stop growing after two sizes in a row that are slower than this share of the fastest.
SLOWER = 0.9

# A round: nodes of a tree, seconds of a step with it and of a plain one.
Round = tuple[int, float, float]


def fit_tree(
    model: Model,
    prompts: Sequence[Prompt],
    options: Options,
    sizes: Sequence[int],
    *,
    batches: Sequence[int] = (1,),
    rounds: int = ROUNDS,
    copies: bool = True,
    keep: Path | None = None,
    texts: Sequence[Text] = (),
) -> Json:
    """Measure and choose a tree; return the content of a tree file with its evidence.

    Args:
      options: of the texts; their temperature selects the acceptance rule.
      sizes: numbers of nodes to time until larger trees are clearly slower; 1 (plain) is added; (): the usual ones.
        A size beyond the texts' largest tree stands for that tree.
      batches: batch sizes, one rung each; the evidence is that of the first.
      copies: whether trees may hold a chain copied from the text.
      keep: file for the ranks of finished texts, from which an interrupted run continues.
      texts: the model's answers to the prompts, if they are known.
    """
    ranked = rank_texts(model, prompts, options, keep, texts)
    total = TextRanks.join(ranked)
    grow = partial(growth.order_by_steps, n_choices=GROWTH, copies=copies)
    order = grow(ranked)
    largest = len(order.growth) + 1
    usual = CPU_SIZES if jax.default_backend() == "cpu" else SIZES_TO_TIME
    sizes = sorted({1, *(min(size, largest) for size in sizes or usual)})
    tokens = dict(zip(sizes, growth.held_out_tokens(ranked, grow, sizes)))
    time_trees = partial(
        time_sizes, model, order, tokens, model.encode(prompts[0]),
        temperature=options.temperature, rounds=rounds,
    )  # fmt: skip
    timed = {rows: time_trees(rows) for rows in batches}
    rungs: list[Json] = []
    for rows in batches:
        table = figures_of(timed[rows], tokens)
        rungs.append({"nodes": fastest(table), "batch": rows, "rows": table})
    device, base = jax.devices()[0], timed[batches[0]]
    seconds = {
        order.tree(n): float(np.median([s for m, s, _ in base if m == n]))
        for n in sorted({m for m, _, _ in base})
    }
    return {
        "choices": [list(c) for c in order.growth[: rungs[0]["nodes"] - 1]],
        "nodes": rungs[0]["nodes"],
        "growth": [list(c) for c in order.growth],
        "spares": [list(c) for c in order.spares],
        "platform": device.platform,
        "device": f"{device.device_kind}, {jax.local_device_count()} device(s)",
        "mark": model.trees.mark,
        "dtype": str(model.dtype),
        "temperature": options.temperature,
        "acceptance": "sampled" if options.temperature > 0 else "greedy",
        "batch": batches[0],
        "date": date.today().isoformat(),
        "evidence": {
            "prompts": len(prompts),
            "positions": len(total.ranks_PK),
            "head_accuracies": np.round(growth.head_accuracies(total.ranks_PK), 4).tolist(),
            "ladder": [figures(ranked, seconds, t, tokens[t.n_nodes]) for t in seconds],
        },
        "batches": rungs,
    }


def rank_texts(
    model: Model,
    prompts: Sequence[Prompt],
    options: Options,
    keep: Path | None = None,
    texts: Sequence[Text] = (),
) -> list[TextRanks]:
    """Write an answer to each prompt and rank its tokens; too short answers are skipped.

    Args:
      keep, texts: as for `fit_tree`.

    Raises:
      UserError: fewer than two answers are long enough.
    """
    prompt_ids = [text.prompt for text in texts] or [model.encode(p) for p in prompts]
    weights = b"".join(map(sample_bytes, jax.tree.leaves(model.variables)))
    options = options.with_penalty(model.repetition_penalty)
    settings = model.text_settings(options.repetition_penalty)
    made_by = (model.drafter.heads, settings, model.storage, zlib.crc32(weights))
    marks = repr((prompt_ids, options, *made_by, *texts))
    records = _earlier_ranks(keep, marks)
    with ProgressBar("texts and their ranks", len(prompt_ids), "text", len(records)) as bar:
        for at in range(len(records), len(prompt_ids), ROWS):
            bar.update(0, "compiling")

            def watch(n_new_B: np.ndarray) -> None:
                bar.update(0, f"{n_new_B.sum()} tokens of the next ones")

            batch = texts[at : at + ROWS] or answer_prompts(
                model, prompt_ids[at : at + ROWS], options, watch
            )
            bar.update(0, "ranking")
            records += record(model, batch, options)
            bar.update(len(batch), "")
            if keep:
                rows = [[np.asarray(x).tolist() for x in one] for one in records]
                write_json(keep, {"marks": marks, "texts": rows}, indent=None)
    records = [one for one in records if len(one.ranks_PK)]
    if len(records) < 2:
        raise UserError(
            f"{len(records)} of {len(prompts)} continuations are long enough to calibrate on, two "
            "are needed: trees are evaluated on held-out texts"
        )
    return records


def _earlier_ranks(keep: Path | None, marks: str) -> list[TextRanks]:
    """Ranks that an interrupted run with the same settings stored."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if keep and (note := json.loads(keep.read_text()))["marks"] == marks:
            return [TextRanks(*(np.array(x) for x in one)) for one in note["texts"]]
    return []


def time_sizes(
    model: Model,
    order: Order,
    tokens: Mapping[int, float],
    prompt: Sequence[int],
    rows: int,
    *,
    temperature: float = 0.0,
    rounds: int = ROUNDS,
) -> list[Round]:
    """Time steps with growing trees, interleaved with plain ones, until they are clearly slower.

    Args:
      tokens: tokens per step by size, ascending.
      rows: batch size.
    """
    engine = partial(model.engine, sampled=temperature > 0)
    sizes = [n for n in tokens if order.tree(n).drafted.depth <= model.drafter.n_heads]
    engines = {n: engine(order.tree(n)) for n in sizes}
    plain = engine(Tree.none())
    clock = StepClock(
        [plain, *engines.values()], model.variables, prompt,
        batch=rows, temperature=temperature, n_steps=STEPS,
    )  # fmt: skip
    runs: list[Round] = []
    with ProgressBar(f"trees for batch {rows}", len(sizes), "size") as bar:
        for n in sizes:
            bar.update(0, f"compiling and timing {n} nodes")
            for _ in range(rounds):
                base = clock.seconds(plain)
                runs.append((n, base if n == 1 else clock.seconds(engines[n]), base))
            bar.update()
            n_left = _n_worth_timing(figures_of(runs, tokens), [m for m in sizes if m > n])
            bar.total = bar.done + n_left
            if not n_left:
                break
    return runs


def _n_worth_timing(rows: Sequence[Json], larger: Sequence[int]) -> int:
    """Number of larger sizes to time, extrapolating the latency of a node."""
    if len(rows) < 2:
        return len(larger)
    peak = max(1.0, *(row["speedup"] for row in rows))
    if all(row["speedup"] < SLOWER * peak for row in rows[-2:]):
        return 0
    (_, a, x), (_, b, y) = ((r["tokens_per_step"], r["nodes"], r["step_latency_ratio"]) for r in rows[-2:])  # fmt: skip
    slope = max(0.0, (y - x) / (b - a))
    slow = [n for n in larger if rows[-1]["tokens_per_step"] < SLOWER * peak * (y + slope * (n - b))]  # fmt: skip
    return min(len(larger), len(larger) - len(slow) + 2)


def figures(
    texts: Sequence[TextRanks], seconds: dict[Tree, float], tree: Tree, tokens: float
) -> Json:
    """All figures of one tree.

    Args:
      seconds: seconds of a step with each timed tree, including plain decoding.
      tokens: tokens per step on held-out texts.
    """
    latency = seconds[tree]
    ratio = max(1.0, latency / seconds[Tree.none()])
    return {
        "nodes": tree.n_nodes,
        "depth": tree.depth,
        "copied": len(tree.copied_C),
        "tokens_per_step": round(tokens, 4),
        "fitted_tokens_per_step": round(growth.replayed_tokens(texts, tree), 4),
        "step_seconds": latency,
        "step_latency_ratio": round(ratio, 4),
        "predicted_speedup": round(tokens / ratio, 4),
    }


def figures_of(timed: Iterable[Round], tokens: Mapping[int, float]) -> list[Json]:
    """Figures of each timed size, smallest first, without plain decoding.

    Other work on the machine comes in bursts and only adds time, so we take ratios within a round and use
    only the faster half of the rounds. A step with a tree is never faster than a plain one.

    Returns: rows with the median ratio, the speed-up, and `spread`: the difference between the quartiles
      of the ratios, as a share of the median.
    """
    rounds: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for size, seconds, base in timed:
        rounds[size].append((seconds, base))
    rows = []
    for size, pairs in sorted(rounds.items()):
        if size == 1:
            continue
        quiet = sorted(pairs, key=sum)[: (len(pairs) + 1) // 2]
        ratios = [seconds / base for seconds, base in quiet]
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        ratio, spread = max(1.0, middle), (high - low) / middle
        values = (tokens[size], ratio, tokens[size] / ratio, spread)
        names = ("tokens_per_step", "step_latency_ratio", "speedup", "spread")
        row = {"nodes": size} | dict(zip(names, (round(float(x), 4) for x in values)))
        rows.append(row)
    return rows


def fastest(rows: Sequence[Json]) -> int:
    """The fastest size; a larger one must beat smaller ones by more than `MARGIN`; 1 is plain decoding."""
    nodes, speedup = 1, 1.0
    for row in rows:
        if row["speedup"] > MARGIN * speedup:
            nodes, speedup = row["nodes"], row["speedup"]
    return nodes
