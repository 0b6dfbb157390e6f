"""The Python interface: `load` a backbone with its draft heads, then `generate` or `stream`.

Commands, evaluators and notebooks use it, too.
"""

from medusa_jax.api.bundles import DEMO, default_drafter, find_heads, find_model
from medusa_jax.api.load import default_dtype, load
from medusa_jax.api.model import Model
from medusa_jax.api.results import Options, Piece, Result
from medusa_jax.api.text_stream import StoppingText

__all__ = [
    "DEMO",
    "Model",
    "Options",
    "Piece",
    "Result",
    "StoppingText",
    "default_drafter",
    "default_dtype",
    "find_heads",
    "find_model",
    "load",
]
