"""The product with a low-rank adapter (`model/lora.py` makes them)."""

from collections.abc import Mapping

import jax

from medusa_jax.model.dropout import dropout_by_seed
from medusa_jax.model.product import product
from medusa_jax.sharding import PyTree


def with_adapter(adapter: Mapping[str, PyTree], x: jax.Array, y: jax.Array) -> jax.Array:
    """y + (dropout(x) A) B, in float32 or wider; inputs are dropped only if the adapter has a seed.

    Args:
      adapter: a, b and keep (1 - dropout rate), as `lora.scale` and `lora.with_dropout` make them.
    """
    a, b, dtype = adapter["a"], adapter["b"], x.dtype
    if "seed" in adapter:
        x = dropout_by_seed(x, 1 - adapter["keep"], adapter["seed"])
    return y + product(product(x, a.astype(dtype)).astype(dtype), b.astype(dtype))
