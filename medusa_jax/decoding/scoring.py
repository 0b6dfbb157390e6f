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
from medusa_jax.model.llama import Llama
from medusa_jax.sharding import Params, on_all, pin_state


@program(static_argnums=(0, 1), donate_argnums=3)
def read_scored(
    llama: Llama,
    n: int,
    params: Params,
    cache: Any,
    tokens_BT: jax.Array,
    next_BT: jax.Array,
    begin_B: jax.Array,
) -> tuple[Any, Logprobs]:
    """Read tokens from position `begin` on; log-probabilities of the token after each, as [B, T]."""
    backbone = Backbone(llama, params)
    position_BT = begin_B[:, None] + jnp.arange(tokens_BT.shape[1])[None, :]
    hidden_BTE, kept = backbone.decode(tokens_BT, position_BT, cache["cache"], begin_B)
    found = logprobs_of(backbone.lm_head(hidden_BTE), next_BT, n)
    return pin_state(llama.mesh, {"cache": kept}), on_all(llama.mesh, found)


def score(
    llama: Llama, params: Params, ids: Sequence[int], n: int, piece: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """log p of every token after the first, and the n likeliest tokens in its place, falling.

    Args:
      piece: tokens read at a time, a power of two.
    """
    config, slots = llama.config, power_of_two(len(ids), piece)
    sizes = (config.n_layers, 1, slots, config.n_kv_heads, config.head_dim)
    cache: Any = pin_state(llama.mesh, {"cache": KVCache.zeros(*sizes, llama.dtype)})
    text_1S = np.zeros((1, slots + 1), np.int32)
    text_1S[0, : len(ids)] = ids
    logprobs: list[float] = []
    likeliest: list[list[tuple[int, float]]] = []
    for begin in range(0, len(ids) - 1, piece):
        here_1T, next_1T = (text_1S[:, b : b + piece] for b in (begin, begin + 1))
        at_1 = np.array([begin], np.int32)
        cache, found = read_scored(llama, n, params, cache, here_1T, next_1T, at_1)
        token_T, best_TN, ids_TN = (
            np.asarray(x)[0].tolist() for x in jax.tree.leaves(found)
        )
        logprobs += token_T
        likeliest += [list(zip(*pair)) for pair in zip(ids_TN, best_TN)]
    return logprobs[: len(ids) - 1], likeliest[: len(ids) - 1]
