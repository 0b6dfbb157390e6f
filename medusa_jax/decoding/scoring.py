"""Log-probabilities of the tokens of a text, read piece by piece like a prompt."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.decoding.generate import power_of_two
from medusa_jax.decoding.logprobs import Logprobs, logprobs_of
from medusa_jax.devices.platforms import program
from medusa_jax.heads.drafter import Backbone
from medusa_jax.model.cache import KVCache
from medusa_jax.sharding import on_all, pin_state


@program(static_argnums=1, donate_argnums=2)
def read_scored(
    backbone: Backbone, n: int, state: Any, tokens_BT: Any, next_BT: Any, begin_B: Any
) -> tuple[Any, Logprobs]:
    """Read tokens from position `begin` on; log-probabilities of the token after each."""
    position_BT = begin_B[:, None] + jnp.arange(tokens_BT.shape[1])[None, :]
    hidden_BTE, cache = backbone.decode(tokens_BT, position_BT, state["cache"], begin_B)
    found = logprobs_of(backbone.lm_head(hidden_BTE), next_BT, n)
    mesh = backbone.llama.mesh
    return pin_state(mesh, {"cache": cache}), on_all(mesh, found)


def score(
    backbone: Backbone, ids: Sequence[int], n: int, piece: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """log p of every token after the first, and the n likeliest tokens in its place, falling.

    Args:
      piece: tokens read at a time, a power of two.
    """
    config, slots = backbone.llama.config, power_of_two(len(ids), piece)
    sizes = (config.n_layers, 1, slots, config.n_kv_heads, config.head_dim)
    state: Any = {"cache": KVCache.zeros(*sizes, backbone.llama.dtype)}
    text_S = np.zeros(slots + 1, np.int32)
    text_S[: len(ids)] = ids
    scored = []
    for begin in range(0, len(ids) - 1, piece):
        two = (text_S[None, b : b + piece] for b in (begin, begin + 1))
        state, found = read_scored(backbone, n, state, *two, np.array([begin], np.int32))
        own_T, best_TN, ids_TN = (np.asarray(x)[0].tolist() for x in jax.tree.leaves(found))
        scored += [(p, list(zip(*top))) for p, *top in zip(own_T, ids_TN, best_TN)]
    return scored[: len(ids) - 1]
