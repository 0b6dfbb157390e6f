"""One decode step as pictures: the attention mask of verification, and the accepted path."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medusa_jax.plots.style import ACCENT, INK, new_figure, save_figure
from medusa_jax.plots.tree import tree_layout

PATH, BONUS = ACCENT, "#3f9b58"


def draw_mask(mask_MM: np.ndarray, labels: Sequence[str], *, path: str | Path) -> Path:
    """Draw a tree's attention mask: a row per node, a column per slot that it may see.

    The first column stands for the whole text before the tree, which every node sees.

    Args:
      mask_MM: `Tree.mask_MM`; [v, u] is True if node v sees node u.
      labels: names of node 0, 1, ..., root first.
    """
    M = len(mask_MM)
    figure = new_figure(0.34 * M + 2.2, 0.34 * M + 1.4)
    axes = figure.subplots()
    pairs = [(u, v) for v in range(M) for u in range(M) if mask_MM[v][u]]
    cells = [(u, v) for u in range(-1, M) for v in range(M)]
    square = {"marker": "s", "s": 330, "linewidths": 0}
    axes.scatter(*zip(*cells, strict=True), color=INK, alpha=0.12, **square)
    axes.scatter([-1] * M, range(M), color=INK, alpha=0.6, **square)
    axes.scatter(*zip(*pairs, strict=True), color=PATH, **square)
    axes.set_xticks(range(-1, M), ["text", *labels], rotation=90, color=INK, fontsize=8)
    axes.set_yticks(range(M), labels, color=INK, fontsize=8)
    for tick in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        tick.set_parse_math(False)
    axes.set_xlim(-1.6, M - 0.4)
    axes.set_ylim(M - 0.4, -0.6)
    axes.set_aspect("equal")
    axes.tick_params(length=0, labelbottom=False, labeltop=True)
    axes.spines[:].set_visible(False)
    return save_figure(figure, path)


def draw_step(
    choices: Sequence[Sequence[int]],
    labels: Sequence[str],
    kept: Sequence[int],
    bonus: str,
    *,
    path: str | Path,
) -> Path:
    """Draw a drafted tree with the accepted path in colour and the bonus token below its end.

    Args:
      choices: in the order of `Tree.choices`.
      labels: tokens of node 0, 1, ..., root first.
      kept: nodes of the accepted path, root first.
      bonus: the verifier's token after that path.
    """
    nodes = [(), *(tuple(c) for c in choices)]
    place = tree_layout(choices)
    depth = 1 + max(d for _, d in place.values())
    n_leaves = 1 + max(x for x, _ in place.values())
    figure = new_figure(max(4.0, 1.05 * n_leaves + 0.6), 0.8 * depth + 0.6)
    axes = figure.subplots()
    axes.set_axis_off()
    path_nodes = [nodes[i] for i in kept]

    def box(x: float, d: float, label: str, colour: str) -> None:
        frame = {"boxstyle": "round,pad=0.3", "facecolor": colour, "edgecolor": "none"}
        style = {"color": "white", "fontsize": 8, "family": "monospace", "zorder": 2}
        centred = {"ha": "center", "va": "center", "parse_math": False}
        axes.text(x, -d, label, bbox=frame, **style, **centred)

    for node, label in zip(nodes, labels, strict=True):
        x, d = place[node]
        colour = PATH if node in path_nodes else INK
        if node:
            width = 2.5 if node in path_nodes else 1.0
            parent_x = place[node[:-1]][0]
            axes.plot([parent_x, x], [1 - d, -d], color=colour, linewidth=width, zorder=1)
        box(x, d, label, colour)
    x, d = place[path_nodes[-1]]
    # Moved aside if rejected drafts are drawn below this node.
    aside = x + (0.5 if any(len(n) > d and n[:d] == path_nodes[-1] for n in nodes) else 0)
    line = {"color": BONUS, "linewidth": 2.5, "linestyle": ":", "zorder": 1}
    axes.plot([x, aside], [-d, -d - 1], **line)
    box(aside, d + 1, bonus, BONUS)
    axes.set_xlim(-0.7, n_leaves - 0.3)
    axes.set_ylim(-depth - 0.4, 0.4)
    return save_figure(figure, path)
