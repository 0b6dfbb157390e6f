"""Prefill: read prompts piece by piece."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.decoding.acceptance.targets import target_tokens
from medusa_jax.decoding.logprobs import Logprobs, logprobs_of
from medusa_jax.decoding.places import adjust, after_text
from medusa_jax.decoding.sampling import Sampling
from medusa_jax.decoding.state import (
    DecodeState,
    Engine,
    RowOptions,
    empty_logprobs,
    fresh_state,
)
from medusa_jax.decoding.step import checked, emit, write_tokens
from medusa_jax.heads.drafter import Committed
from medusa_jax.heads.state import rewind_state
from medusa_jax.model.backbone import Backbone
from medusa_jax.programs import program
from medusa_jax.sharding import Params, pin_state

# Prompt tokens per piece: enough that arithmetic outweighs reading the weights on any device, few enough
# that activations are small compared with the weights.
PIECE = 512


class PromptArrays(NamedTuple):
    """Prompts and parameters of a batch, as `prefill` reads them.

    Attributes:
      prompt_BT: token ids, right-padded; T is at most `PIECE` or a multiple of it.
      prompt_length_B: tokens of each prompt, at least 1.
      options: of each row; limits are at least 1.
      output_BO: zeros, with O >= max(limit) + L.
    """

    prompt_BT: jax.Array
    prompt_length_B: jax.Array
    options: RowOptions
    output_BO: jax.Array


class PromptPiece(NamedTuple):
    """Consecutive tokens of every prompt.

    Attributes:
      tokens_BP: the tokens and the one after them, P = T + 1; after the end of a prompt any token.
      begin_B: the position of the first token.
      length_B: tokens of the whole prompt.
    """

    tokens_BP: jax.Array
    begin_B: jax.Array
    length_B: jax.Array

    @classmethod
    def of(cls, prompt: Sequence[int] | np.ndarray, begin: int, size: int) -> "PromptPiece":
        """The tokens of one prompt from index `begin` on, in NumPy's arrays."""
        ids = prompt[begin : begin + size + 1]
        tokens_1P: Any = np.zeros((1, size + 1), np.int32)
        tokens_1P[0, : len(ids)] = ids
        return cls(tokens_1P, *np.array([[begin], [len(prompt)]], np.int32))


def read_piece(
    engine: Engine,
    variables: Params,
    state: DecodeState,
    piece: PromptPiece,
    all_end: bool = False,
) -> DecodeState:
    """Read a piece of every prompt; rows whose prompt ends in it emit their first token.

    Pieces may overlap.

    Args:
      state: its cache contains the text before the piece and has room for it: begin + T <= slots.
      all_end: every prompt ends in this piece, so the step need not check.
    """
    tokens_BP, begin_B, length_B = piece
    tokens_BT, next_BT = tokens_BP[:, :-1], tokens_BP[:, 1:]
    T, text_BS = tokens_BT.shape[1], state.text_BS
    backbone, kernels = engine.backbone(variables), engine.kernels
    position_BT = begin_B[:, None] + jnp.arange(T)[None, :]
    last_B1 = (length_B - 1)[:, None]
    is_last_BT = position_BT == last_B1
    ends_B = jnp.any(is_last_BT, axis=1)
    count_B = jnp.clip(length_B - begin_B, 0, T)
    if text_BS is not None:
        text_BS = write_tokens(kernels, text_BS, tokens_BT, begin_B)
    hidden_BTE, cache = backbone.read(tokens_BT, state.cache, begin_B, count_B)

    def first_token() -> tuple[jax.Array, Logprobs | None]:
        """The first token of every row, as if its prompt ended here, and its log-probabilities."""
        here_B1 = jnp.clip(last_B1 - begin_B[:, None], 0, T - 1)
        last_B1E = jnp.take_along_axis(hidden_BTE, here_B1[..., None], axis=1)
        return token_after(engine, backbone, state.sampling, text_BS, last_B1, last_B1E)

    if all_end:
        first_B1, logprobs = first_token()
    else:
        zero_B1 = jnp.zeros_like(last_B1)
        none = zero_B1, empty_logprobs(engine, zero_B1)
        first_B1, logprobs = lax.cond(jnp.any(ends_B), first_token, lambda: none)
    first_B, broken_B = checked(first_B1[:, 0], engine.llama.config.vocab_size)
    broken_B &= ends_B
    next_BT = jnp.where(is_last_BT, first_B[:, None], next_BT)
    new = Committed(hidden_BTE, tokens_BT, next_BT, position_BT, count_B)
    drafter = rewind_state(state.drafter, jnp.minimum(begin_B, length_B))
    drafter = engine.drafter.commit(variables["heads"], backbone, drafter, new)
    root_B = jnp.where(ends_B, first_B, state.root_B)
    if text_BS is not None:  # a prompt's next piece overwrites it
        text_BS = write_tokens(kernels, text_BS, root_B[:, None], length_B)
    state = state.replace(
        cache=cache, drafter=drafter, length_B=length_B, root_B=root_B, text_BS=text_BS
    )
    path_BL = jnp.zeros_like(state.histogram_BL).at[:, 0].set(first_B)
    n_B = ends_B.astype(jnp.int32)
    state, _ = emit(kernels, state, path_BL, n_B, logprobs, broken_B)
    return pin_state(engine.llama.mesh, state)


def token_after(
    engine: Engine,
    backbone: Backbone,
    sampling: Sampling,
    text_BS: jax.Array | None,
    last_B1: jax.Array,
    hidden_B1E: jax.Array,
) -> tuple[jax.Array, Logprobs | None]:
    """The token [B, 1] after each row's text, as `Kernels.best_token` returns it, and its log-probabilities.

    Args:
      text_BS: the texts; None unless the engine keeps them.
      last_B1: index of the last token.
      hidden_B1E: its hidden state.
    """
    barred_BS = text_BS if engine.no_repeat_ngram_size else None
    place = after_text(sampling, barred_BS, last_B1[:, 0])
    if sampling.first_BW is not None:
        place = place._replace(allowed_BPW=sampling.first_BW[:, None])
    logits_B1V = backbone.lm_head(hidden_B1E)
    reported_B1V, chosen_B1V = adjust(engine, sampling, backbone, place, logits_B1V)
    draws = sampling if engine.rule.noise is not None else None
    token_B1 = target_tokens(engine.kernels, chosen_B1V, last_B1, draws)
    n = engine.logprobs
    return token_B1, None if n is None else logprobs_of(reported_B1V, token_B1, n)


@program(static_argnums=(0, 1))
def prefill(
    engine: Engine, slots: int, variables: Params, prompts: PromptArrays
) -> DecodeState:
    """Read the prompts and emit the first token of every row.

    Long prompts are read in pieces of `PIECE` tokens, so memory other than the cache does not grow
    with the prompt.

    Args:
      slots: cache slots to allocate, at least T.
    """
    prompt_BT, length_B, options, output_BO = prompts
    T = prompt_BT.shape[1]
    piece = min(T, PIECE)
    if T % piece:
        raise ValueError(f"{T} prompt tokens are not a multiple of a piece of {piece}")
    padded_BP = jnp.pad(prompt_BT, ((0, 0), (0, 1)))

    def read_next(i: jax.Array | int, state: DecodeState) -> DecodeState:
        begin = i * piece
        tokens_BP = lax.dynamic_slice_in_dim(padded_BP, begin, piece + 1, axis=1)
        begin_B = jnp.full_like(length_B, begin)
        next_piece = PromptPiece(tokens_BP, begin_B, length_B)
        return read_piece(engine, variables, state, next_piece, all_end=piece == T)

    state = fresh_state(engine, slots, options, output_BO)
    if piece == T:
        return read_next(0, state)
    pieces = -(-jnp.max(length_B) // piece)  # those after the longest prompt are skipped
    return lax.fori_loop(0, pieces, read_next, state)
