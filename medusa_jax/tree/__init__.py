"""The draft tree, and fitting it to the guesses of draft heads."""

from medusa_jax.tree.files import (
    auto_tree,
    file_ladder,
    load_tree_file,
    parse_tree,
    tree_at,
    tree_of_size,
)
from medusa_jax.tree.tree import Choice, Tree, stand_in

__all__ = [
    "Choice",
    "Tree",
    "auto_tree",
    "file_ladder",
    "load_tree_file",
    "parse_tree",
    "stand_in",
    "tree_at",
    "tree_of_size",
]
