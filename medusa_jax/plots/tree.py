"""Pictures of draft trees."""

from collections.abc import Sequence
from pathlib import Path

from medusa_jax.plots.style import ACCENT, INK, new_figure, save_figure

TreePath = tuple[int, ...]


def tree_layout(choices: Sequence[Sequence[int]]) -> dict[TreePath, tuple[float, int]]:
    """Return the place of every node, root () included: path -> (x, depth).

    Leaves are at x = 0, 1, 2, ... in order of rank; a parent is centred over its first and last
    child.

        [[0], [1], [0, 0], [0, 1]]:  (0,0) 0, (0,1) 1, (1,) 2; (0,) over 0.5; () over 1.25
    """
    nodes = {(), *(tuple(c) for c in choices)}
    children: dict[TreePath, list[TreePath]] = {node: [] for node in nodes}
    for node in sorted(nodes - {()}):
        children[node[:-1]].append(node)
    place: dict[TreePath, tuple[float, int]] = {}
    leaves = 0
    # Depth-first in order of rank puts leaves in order; parents are placed after their children.
    for node in sorted(nodes):
        if not children[node]:
            place[node] = (float(leaves), len(node))
            leaves += 1
    for node in sorted(nodes, key=len, reverse=True):
        if kids := children[node]:
            place[node] = ((place[kids[0]][0] + place[kids[-1]][0]) / 2, len(node))
    return place


def draw_tree(
    choices: Sequence[Sequence[int]], values: Sequence[float] = (), *, path: str | Path
) -> Path:
    """Draw a draft tree, root on top, each node labelled with its rank (c if copied).

    Args:
      values: acceptance probability of each node, in the order of `choices`: width and colour of the edge above it,
        printed in small trees.
      path: its suffix selects the format (.svg, .png, .pdf).
    """
    place = tree_layout(choices)
    value_of: dict[TreePath, float] = {}
    if values:
        value_of = {(): 1.0} | dict(zip(map(tuple, choices), values, strict=True))
    n_leaves = 1 + max(x for x, _ in place.values())
    depth = max(d for _, d in place.values())
    figure = new_figure(min(16.0, max(3.0, 0.42 * n_leaves + 1.0)), 0.95 * depth + 1.0)
    axes = figure.subplots()
    axes.set_axis_off()
    from matplotlib.colors import LinearSegmentedColormap

    # Grey to orange: both ends are visible on white and on black.
    colours = LinearSegmentedColormap.from_list("acceptance", [INK, ACCENT])
    size, area = (5, 60) if n_leaves > 45 else (8.5, 190)
    for node, (x, d) in place.items():
        value = value_of.get(node)
        colour = INK if value is None else colours(value)
        if node:
            parent_x, _ = place[node[:-1]]
            width = 1.2 if value is None else 0.6 + 6.0 * value
            axes.plot([parent_x, x], [1 - d, -d], color=colour, linewidth=width, zorder=1)
        axes.scatter([x], [-d], s=area, color=colour, zorder=2)
        if node:
            label = {"ha": "center", "va": "center", "zorder": 3}
            name = str(node[-1]) if node[-1] >= 0 else "c"
            axes.text(x, -d, name, color="white", fontsize=size, **label)
            if value is not None and len(place) <= 24:
                text = f"{value:.2f}".removeprefix("0")
                axes.text(x + 0.28, -d, text, color=INK, fontsize=7, va="center")
    axes.set_xlim(-0.7, n_leaves - 0.3)
    axes.set_ylim(-depth - 0.4, 0.4)
    return save_figure(figure, path)
