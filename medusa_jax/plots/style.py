"""Common style of all pictures: legible on light and dark pages.

Charts have a transparent background and medium grey ink. Matplotlib is imported on first use.
"""

from pathlib import Path

from medusa_jax.errors import UserError

INK = "#7a828c"
ACCENT = "#e0672b"


def new_figure(width: float, height: float):
    """A matplotlib figure outside pyplot: no window, no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "drawing charts needs matplotlib: pip install 'medusa-jax[plots]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure, path: str | Path) -> Path:
    """Save a figure in the format of its suffix; the directory is created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, dpi=150)
    return path


def finish(axes, title: str, xlabel: str) -> None:
    """Title and label of the x axis; frame, ticks and grid in grey."""
    axes.set_title(title, color=INK, fontsize=10)
    axes.set_xlabel(xlabel, color=INK, fontsize=8)
    axes.tick_params(colors=INK, labelsize=8, which="both")
    axes.grid(color=INK, alpha=0.2, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_color(INK)
