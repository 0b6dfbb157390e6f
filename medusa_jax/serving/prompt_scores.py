"""Score a prompt, for an answer that repeats it: evaluation harnesses score texts this way."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from medusa_jax.api import Model
from medusa_jax.decoding.logprobs import Logprobs, logprobs_of
from medusa_jax.decoding.request import power_of_two
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.cache import KVCache
from medusa_jax.programs import program
from medusa_jax.serving.batch import LEAST_SLOTS
from medusa_jax.serving.request import MOST_BEST, Delta
from medusa_jax.sharding import on_all, pin_state, placed


def score_prompt(
    model: Model,
    text: str,
    ids: Any,
    n: int | None,
    piece: int | None = None,
    slots: int = LEAST_SLOTS,
    wanted: Callable[[], bool] = lambda: True,
) -> Delta:
    """Score a prompt, read piece by piece like any; returns it as the first part of an answer.

    Args:
      ids: the tokens of the text.
      n: number of likeliest tokens at each place; None leaves out log-probabilities. The first token
        has none.
      piece: tokens read at a time, a power of two; by default as the server reads.
      slots: least size of the cache, a power of two; each size has a program.
      wanted: called before each piece; once it returns False, the rest of the prompt stays without scores.
    """
    if n is None:
        return Delta([(text, 0)], list(ids), [], [])
    piece = piece or model.llama.kernels.prompt_piece
    backbone, slots = model.backbone, power_of_two(len(ids), max(piece, slots))
    n_top = min(MOST_BEST, model.config.vocab_size)  # one program
    empty = {"cache": KVCache.zeros(model.config, 1, slots, backbone.llama.dtype)}
    state: Any = placed(backbone.llama.mesh, empty)
    text_S = np.zeros(slots + 1, np.int32)
    text_S[: len(ids)] = ids
    logprobs, tops = list[float | None]([None]), list[Any]([None])
    for begin in range(0, len(ids) - 1, piece):
        if not wanted():
            break
        tokens_BT, next_BT = (text_S[None, b : b + piece] for b in (begin, begin + 1))
        begin_B = np.array([begin], np.int32)
        state, scored = read_scored(backbone, n_top, state, tokens_BT, next_BT, begin_B)
        text_T, best_TN, ids_TN = (
            np.asarray(x)[0].tolist() for x in jax.tree.leaves(scored)
        )
        logprobs += text_T
        tops += [list(zip(*top))[:n] for top in zip(ids_TN, best_TN)]
    return Delta([(text, 0)], list(ids), logprobs[: len(ids)], tops[: len(ids)])


@program(static_argnums=1, donate_argnums=2)
def read_scored(
    backbone: Backbone, n: int, state: Any, tokens_BT: Any, next_BT: Any, begin_B: Any
) -> tuple[Any, Logprobs]:
    """Read tokens from position `begin` on; return log-probabilities of the token after each."""
    hidden_BTE, cache = backbone.read(tokens_BT, state["cache"], begin_B)
    logprobs = logprobs_of(backbone.lm_head(hidden_BTE), next_BT, n)
    mesh = backbone.llama.mesh
    return pin_state(mesh, {"cache": cache}), on_all(mesh, logprobs)
