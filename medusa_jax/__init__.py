"""medusa_jax: draft-head speculative decoding for Llama-family models in JAX.

    from medusa_jax import Options, Tree, load

    model = load()  # the demo; load(model, drafter) for yours
    [result] = model.generate(["def parse("], Options(max_new_tokens=100))

Dimension key, used as suffixes on arrays that cross a function boundary:
  B batch, T query tokens, S cache slots, D model width, E width of hidden states (D, and D for each
  tapped layer), F mlp width, V vocabulary, O output tokens, or tokens that heads score, N query heads,
  G key/value heads, H head dim, I inputs of a product, K draft heads, M tree nodes (root included), C children, L path
  length (at most K + 1), P positions of a text, or parents, R query heads per key/value head, or rows of a pass, Q stop
  sequences of up to W tokens; in `token_sets` W words of bits, in `learning` W tokens of a window; N also sizes of a tree.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from medusa_jax.api.load import load
    from medusa_jax.api.model import Model
    from medusa_jax.api.results import Options, Piece, Result
    from medusa_jax.commands.own import sft_draft
    from medusa_jax.errors import UserError
    from medusa_jax.tree.tree import Tree

__all__ = [
    "Model", "Options", "Piece", "Result", "Tree", "UserError", "load", "sft_draft",
]  # fmt: skip

_HOMES = {
    "Tree": "medusa_jax.tree.tree",
    "UserError": "medusa_jax.errors",
    "sft_draft": "medusa_jax.commands.own",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `medusa_jax` itself must not cost the time of importing JAX."""
    if name not in __all__:
        raise AttributeError(f"module 'medusa_jax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "medusa_jax.api")), name)


def __dir__() -> list[str]:
    """The public names, also before their first use."""
    return sorted([*__all__, "__version__"])
