"""Pictures: draft trees, decode steps, curves, text coloured by accepted depth."""

from medusa_jax.plots.charts import Chart, draw_curves, draw_lines
from medusa_jax.plots.step import draw_mask, draw_step
from medusa_jax.plots.text import accepted_text_svg, draw_accepted_text
from medusa_jax.plots.tree import draw_tree, tree_layout

__all__ = [
    "Chart",
    "accepted_text_svg",
    "draw_accepted_text",
    "draw_curves",
    "draw_lines",
    "draw_mask",
    "draw_step",
    "draw_tree",
    "tree_layout",
]
