"""Tree shapes that papers compare: fitted trees of one depth, random dense trees.

Accepted lengths are computed from recorded ranks; only latencies are measured.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from medusa_jax.tree import Choice, Tree, growth

# Amphista's table 7: "varying numbers of draft tree nodes without changing the tree depth".
LEVEL_DEPTH = 4
# Medusa's figure 4: dense trees, the Cartesian products of 2.1.2, reach 256 nodes.
DENSE_NODES = 256


def of_one_depth(
    texts: Sequence[growth.Recorded],
    grow: Callable[[growth.Recorded], list[Choice]],
    sizes: Sequence[int],
) -> dict[Tree, float]:
    """The best trees of these sizes, `LEVEL_DEPTH` deep at most, and their tokens per step.

    Args:
      texts: positions of each text, two texts at least; trees are evaluated on held-out texts.
      grow: best choices first.
    """
    texts = [text.cut(LEVEL_DEPTH) for text in texts]
    choices = grow(growth.Recorded.joined(texts))
    sizes = [size for size in sizes if size <= len(choices) + 1]
    trees = [Tree.from_choices(choices[: size - 1]) for size in sizes]
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


def latency(tree: Tree, seconds: Mapping[Tree, float]) -> float:
    """Seconds of a step: as timed, or interpolated over the number of nodes."""
    if tree in seconds:
        return seconds[tree]
    timed = sorted((other.n_nodes, s) for other, s in seconds.items())
    nodes, times = zip(*timed, strict=True)
    return float(np.interp(tree.n_nodes, nodes, times))
