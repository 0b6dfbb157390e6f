"""`python -m research tree_shapes`: fitted trees, trees of one depth and random dense trees.

Medusa's figure 4 and Amphista's table 7: tokens per step on held-out text from recorded ranks, and steps
timed on this device. Writes tree_shapes.json and dense.png.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from medusa_jax import plots
from medusa_jax.api import Model
from medusa_jax.commands.flags import Program, at_least, flag, numbers
from medusa_jax.commands.model_flags import (
    GenerationFlags,
    ModelFlags,
    generation_options,
    load_model,
)
from medusa_jax.console import inform, use_compilation_cache
from medusa_jax.evaluate.fitting import GROWTH, figures, rank_texts
from medusa_jax.evaluate.questions import prompt_of, read_prompts
from medusa_jax.evaluate.tables import Cell, table_of
from medusa_jax.tree import growth
from medusa_jax.tree.tree import Order, Tree
from medusa_jax.whole_files import Json, write_json
from research.timed_steps import step_seconds

EXAMPLES = """examples:
  python -m research tree_shapes --drafter hydra --prompts work/demo/calibration.jsonl
"""
COLUMNS: dict[str, Cell] = {
    "nodes": "{nodes}",
    "depth": "{depth}",
    "tokens per step": "{tokens_per_step:.2f}",
    "step latency": "{step_latency_ratio:.2f}x",
    "speed-up to expect": "{predicted_speedup:.2f}x",
}
# Amphista's table 7: "varying numbers of draft tree nodes without changing the tree depth".
LEVEL_DEPTH = 4
# Medusa's figure 4: dense trees, the Cartesian products of 2.1.2, reach 256 nodes.
DENSE_NODES = 256


def cut(text: growth.Recorded, depth: int) -> growth.Recorded:
    """The same positions, limited to trees of this depth."""
    copied_P = np.minimum(text.copied_P, depth)
    return growth.Recorded(text.ranks_PK[:, :depth], copied_P, text.repeats_P)


def of_one_depth(
    texts: Sequence[growth.Recorded],
    grow: Callable[[Sequence[growth.Recorded]], Order],
    sizes: Sequence[int],
) -> dict[Tree, float]:
    """The best trees of these sizes, `LEVEL_DEPTH` deep at most, and their tokens per step.

    Args:
      texts: positions of each text, two texts at least; trees are evaluated on held-out texts.
    """
    texts = [cut(text, LEVEL_DEPTH) for text in texts]
    order = grow(texts)
    sizes = [size for size in sizes if size <= len(order.growth) + 1]
    trees = [order.tree(size) for size in sizes]
    return dict(zip(trees, growth.held_out_tokens(texts, grow, sizes)))


def random_dense(
    n_heads: int,
    n: int,
    most_nodes: int = DENSE_NODES,
    most_wide: int = growth.MISS,
    seed: int = 0,
) -> list[tuple[list[int], Tree]]:
    """n different Cartesian trees of at most `most_nodes` nodes, root included, with their widths.

    Depths are uniform, numbers of nodes log-uniform. Returns fewer than n if it does not find that
    many.
    """
    rng = np.random.default_rng(seed)
    found: dict[tuple[int, ...], Tree] = {}
    for _ in range(100 * n):
        if len(found) == n:
            break
        room = (most_nodes + 1) ** rng.uniform(0.25, 1.0)
        widths, nodes, level = [], 1, 1
        for _ in range(rng.integers(1, n_heads + 1)):
            most = min(int((room - nodes) // level), most_wide)
            if most < 1:
                break
            widths.append(int((most + 1) ** rng.uniform()))
            level *= widths[-1]
            nodes += level
        if widths:
            found[tuple(widths)] = Tree.cartesian(widths)
    return [(list(widths), tree) for widths, tree in sorted(found.items())]


def to_time(dense: Sequence[tuple[list[int], Tree]]) -> list[Tree]:
    """Choose the trees to time: the largest dense tree and the one nearest to half its size.

    Two are enough, since latency depends on the number of nodes and every tree has to be compiled.
    """
    trees = sorted((tree for _, tree in dense), key=lambda tree: tree.n_nodes)
    if not trees:
        return []
    half = trees[-1].n_nodes / 2
    return [min(trees, key=lambda tree: abs(tree.n_nodes - half)), trees[-1]]


def with_latency(trees: Sequence[Tree], seconds: Mapping[Tree, float]) -> dict[Tree, float]:
    """Seconds of a step: as timed, or interpolated over the number of nodes."""
    nodes, times = zip(*sorted((tree.n_nodes, s) for tree, s in seconds.items()))
    between = {tree: float(np.interp(tree.n_nodes, nodes, times)) for tree in trees}
    return between | dict(seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(GenerationFlags, ModelFlags):
    """Compare shapes of trees."""

    prompts: str = flag("JSONL with prompt or prompt_ids")
    limit: int = flag("most prompts to use; 0 is all", 24, type=at_least(0))
    sizes: tuple[int, ...] = flag(
        "of fitted trees", "1,2,3,4,8,16,32,64", type=numbers(least=1)
    )
    one_depth: tuple[int, ...] = flag(
        "sizes of trees of depth 4 at most (Amphista's table 7)",
        "22,35,45,64",
        type=numbers(least=1),
    )
    dense: int = flag(
        "random dense trees of up to 256 nodes (Medusa's figure 4)", 60, type=at_least(2)
    )
    copies: bool = flag("trees may hold a copied chain", False)
    rounds: int = flag("timed rounds", 7, type=at_least(1))
    out: str = flag("directory for results", "work/tree_shapes")


def measure(flags: Flags, model: Model, prompts: Sequence[str | list[int]]) -> Json:
    """Figures of all trees by kind, and the widths of the dense ones."""
    options = generation_options(flags)
    texts = rank_texts(model, prompts, options)
    grow = partial(growth.order_by_steps, n_choices=GROWTH, copies=flags.copies)
    order = grow(texts)
    sizes = [n for n in flags.sizes if n <= len(order.growth) + 1]
    sizes = sorted({1, *sizes})
    fitted = [order.tree(size) for size in sizes]
    level = of_one_depth(texts, grow, flags.one_depth)
    scored = model.drafter.heads.draft_vocab or model.config.vocab_size
    widest = min(growth.MISS, scored)
    dense = random_dense(model.drafter.n_heads, flags.dense, most_wide=widest)
    timed = list(dict.fromkeys([*fitted, *level, *to_time(dense)]))
    seconds = step_seconds(
        model, timed, model.encode(prompts[0]), rounds=flags.rounds,
        temperature=options.temperature,
    )  # fmt: skip
    trees = [tree for _, tree in dense]
    row = partial(figures, texts, with_latency(trees, dict(zip(timed, seconds))))
    tokens = growth.held_out_tokens(texts, grow, sizes)
    return {
        "fitted": [row(tree, n) for tree, n in zip(fitted, tokens)],
        "one_depth": [row(tree, n) for tree, n in level.items()],
        "dense": [row(tree, growth.replayed_tokens(texts, tree)) for tree in trees],
        "widths": [widths for widths, _ in dense],
    }


def draw(found: Json, path: Path) -> None:
    """Medusa's figure 4: (a) accepted length and (b) speed, both against plain decoding."""

    def chart(title: str, field: str) -> plots.Chart:
        lines, points = (
            {label: ([row["nodes"] for row in rows], [row[field] for row in rows])}
            for label, rows in (
                ("fitted, sparse", found["fitted"]),
                ("random, dense", found["dense"]),
            )
        )
        return plots.Chart(title, "nodes (root included)", lines, points=points)

    charts = [
        chart("tokens per step", "tokens_per_step"),
        chart("speed-up", "predicted_speedup"),
    ]
    plots.draw_lines(charts, path=path)


def run(flags: Flags) -> int:
    """Measure, print the tables of fitted trees, write the files."""
    use_compilation_cache()
    records = read_prompts(flags.prompts, flags.limit)
    out = Path(flags.out)
    out.mkdir(parents=True, exist_ok=True)
    model = load_model(flags, needs_heads=True, tree="none")
    found = measure(flags, model, [prompt_of(record) for record in records])
    write_json(out / "tree_shapes.json", found)
    draw(found, out / "dense.png")
    for kind in ("fitted", "one_depth"):
        print(f"{kind.replace('_', ' ')}\n\n{table_of(found[kind], COLUMNS)}\n")
    inform(f"wrote {out}/tree_shapes.json and dense.png")
    return 0


main = Program("python -m research tree_shapes", Flags, run, EXAMPLES)
