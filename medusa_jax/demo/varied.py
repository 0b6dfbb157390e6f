"""Greedy text that may repeat itself only so much: what `refine` teaches the demo's backbone.

At every step the likeliest token is taken, unless it completes a 4-gram that the new text has
held before and the text holds as many repeats already as are allowed: then the likeliest token
that completes none. A share of 1 is plain greedy decoding.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.api.model import Model
from medusa_jax.decoding.generate import Request, begin
from medusa_jax.decoding.step import DecodeState, Engine
from medusa_jax.heads.drafter import Base
from medusa_jax.tree import Tree

NGRAM = 4
# A text is judged as if it were at least so long: its first repeats say little.
LEAST_LENGTH = 50


def completions(tokens_BO: jax.Array, n: jax.Array, vocab_size: int) -> jax.Array:
    """Which next tokens would complete a 4-gram that stands in the first n tokens: [B, V].

    Example: the text is  a b c d x a b c  : only d would.
    """
    B, O = tokens_BO.shape
    index_O = jnp.arange(O)
    match_BO = jnp.broadcast_to((index_O >= NGRAM - 1) & (index_O < n), (B, O))
    for back in range(1, NGRAM):
        last_B1 = lax.dynamic_slice_in_dim(tokens_BO, jnp.maximum(n - back, 0), 1, axis=1)
        match_BO &= jnp.roll(tokens_BO, back, axis=1) == last_B1
    match_BO &= n >= NGRAM - 1
    found_BV = jnp.zeros((B, vocab_size), bool)
    return found_BV.at[jnp.arange(B)[:, None], tokens_BO].max(match_BO)


@partial(jax.jit, static_argnums=(0, 1))
def _continue(
    engine: Engine,
    n_new: int,
    variables: dict[str, Any],
    state: DecodeState,
    allowed: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    base = Base(engine.llama, variables["base"])
    V = engine.llama.config.vocab_size
    one = jnp.ones((1, 1), bool)

    def body(carry: tuple, n: jax.Array) -> tuple[tuple, None]:
        cache, tokens_BO, swapped_BO, repeats_B, root_B = carry
        length_B = state.length_B + n - 1
        hidden_B1D, cache = base.decode(
            root_B[:, None], length_B[:, None], cache, length_B, one
        )
        logits_BV = base.lm_head(hidden_B1D)[:, 0]
        old_BV = completions(tokens_BO, n, V)
        full_B = repeats_B + 1 > allowed * jnp.maximum(n + 1, LEAST_LENGTH)
        free_B = jnp.argmax(logits_BV, axis=-1)
        barred_BV = old_BV & full_B[:, None]
        token_B = jnp.argmax(jnp.where(barred_BV, -jnp.inf, logits_BV), axis=-1)
        token_B = token_B.astype(root_B.dtype)
        repeats_B += jnp.take_along_axis(old_BV, token_B[:, None], axis=1)[:, 0]
        tokens_BO = lax.dynamic_update_slice_in_dim(tokens_BO, token_B[:, None], n, axis=1)
        swapped_BO = lax.dynamic_update_slice_in_dim(
            swapped_BO, (token_B != free_B)[:, None], n, axis=1
        )
        return (cache, tokens_BO, swapped_BO, repeats_B, token_B), None

    start = (
        state.cache,
        state.tokens_BO,
        jnp.zeros(state.tokens_BO.shape, bool),
        jnp.zeros_like(state.root_B),
        state.root_B,
    )
    (_, tokens_BO, swapped_BO, _, _), _ = lax.scan(body, start, jnp.arange(1, n_new))
    return tokens_BO[:, :n_new], swapped_BO[:, :n_new]


def write_varied(
    model: Model,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    allowed: float,
    batch_size: int = 64,
) -> list[dict[str, Any]]:
    """Continue prompts greedily with at most a share of `allowed` repeated 4-grams.

    Returns: for each prompt {"prompt_ids", "token_ids", "swapped"}: `swapped` counts the tokens
      that were not the likeliest. A text ends behind its first end-of-text token.
    """
    engine = Engine(model.llama, model.drafter, Tree.none())
    batch_size = max(min(batch_size, len(prompts)), 1)
    out = []
    for at in range(0, len(prompts), batch_size):
        rows = list(prompts[at : at + batch_size])
        full = rows + [rows[-1]] * (batch_size - len(rows))
        state, _ = begin(engine, model.variables, Request(full, [n_new] * batch_size))
        slots = max(map(len, full)) + n_new
        cache = state.cache.grown(-(-slots // 64) * 64)  # the loop does not grow it
        tokens_BO, swapped_BO = _continue(
            engine, n_new, model.variables, state.replace(cache=cache), jnp.float32(allowed)
        )
        for prompt, ids, swapped in zip(
            rows, np.asarray(tokens_BO), np.asarray(swapped_BO), strict=False
        ):
            stops = np.flatnonzero(np.isin(ids, model.eos_ids))
            end = int(stops[0]) + 1 if len(stops) else n_new
            out.append({
                "prompt_ids": [int(i) for i in prompt],
                "token_ids": ids[:end].tolist(),
                "swapped": int(swapped[:end].sum()),
            })  # fmt: skip
    return out
