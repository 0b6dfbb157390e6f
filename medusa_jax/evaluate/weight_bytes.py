"""Bytes that a plain decoding step must read, and the types of the stored weights."""

from collections import Counter

import jax

from medusa_jax.api import Model
from medusa_jax.model.stored import Stored


def bytes_per_token(model: Model, length: int) -> int:
    """Bytes that one autoregressive step must read.

    These are all weights except the embedding table, one row of that table, and the cached keys and
    values of `length` positions.
    """
    weights = dict(model.variables["backbone"])
    table = sum(x.nbytes for x in jax.tree.leaves(weights.pop("embed_tokens")))
    total = sum(x.nbytes for x in jax.tree.leaves(weights))
    c = model.config
    cache = 2 * c.n_layers * c.n_kv_heads * c.head_dim * length * model.dtype.itemsize
    return total + cache + table // c.vocab_size


def stored_as(model: Model) -> dict[str, int]:
    """The backbone's weights by stored type, such as {"Q4_1": 106168320}."""
    counts: Counter[str] = Counter()
    ids = set()
    forms = jax.tree.leaves(
        model.variables["backbone"], is_leaf=lambda x: isinstance(x, Stored)
    )
    for form in forms:
        [array, *_] = jax.tree.leaves(form)
        if id(array) not in ids:  # a tied LM head may be the embedding's array
            ids.add(id(array))
            stored = isinstance(form, Stored)
            counts.update(form.types if stored else {str(form.dtype): form.size})
    return dict(counts)
