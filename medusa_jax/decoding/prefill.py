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
from medusa_jax.model.cache import KVCache
from medusa_jax.programs import program
from medusa_jax.sharding import Params, PyTree, pin_state

# Prompt tokens per piece: enough that arithmetic outweighs reading the weights on any device, few enough
# that activations are small compared with the weights.
PIECE = 512


class PrefillState(NamedTuple):
    """Prefill progress so far.

    Attributes:
      cache, drafter: as in `DecodeState`.
      root_B: the first new token of the rows whose whole prompt has been read, as `Kernels.best_token` returns it.
      logprobs: its log-probabilities; None unless the engine keeps them.
    """

    cache: KVCache
    drafter: PyTree
    root_B: jax.Array
    logprobs: Logprobs | None


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
      tokens_BT: the tokens, right-padded.
      next_BT: the token after each; after the end of a prompt it may be any token.
      begin_B: the position of the first token.
      length_B: tokens of the whole prompt.
    """

    tokens_BT: jax.Array
    next_BT: jax.Array
    begin_B: jax.Array
    length_B: jax.Array

    @classmethod
    def of(cls, prompt: Sequence[int] | np.ndarray, begin: int, size: int) -> "PromptPiece":
        """The tokens of one prompt from index `begin` on, in NumPy's arrays."""
        ids = prompt[begin : begin + size + 1]
        tokens_1T: Any = np.zeros((1, size + 1), np.int32)
        tokens_1T[0, : len(ids)] = ids
        begin_1, length_1 = np.array([[begin], [len(prompt)]], np.int32)
        return cls(tokens_1T[:, :-1], tokens_1T[:, 1:], begin_1, length_1)


def prefill_start(engine: Engine, state: DecodeState) -> PrefillState:
    """The progress before any piece has been read into the cache of this state."""
    zero_B = jnp.zeros_like(state.root_B)
    logprobs = empty_logprobs(engine, zero_B[:, None])
    return PrefillState(state.cache, state.drafter, zero_B, logprobs)


def read_piece(
    engine: Engine,
    variables: Params,
    sampling: Sampling,
    text_BS: jax.Array | None,
    before: PrefillState,
    piece: PromptPiece,
    all_end: bool = False,
) -> PrefillState:
    """Read a piece of every prompt, and choose the first token of rows whose prompt ends in it.

    Args:
      text_BS: the prompts up to this piece; None unless the engine keeps the text.
      all_end: every prompt ends in this piece, so the step need not check.
    """
    tokens_BT, next_BT, begin_B, length_B = piece
    T = tokens_BT.shape[1]
    backbone = engine.backbone(variables)
    position_BT = begin_B[:, None] + jnp.arange(T)[None, :]
    last_B1 = (length_B - 1)[:, None]
    is_last_BT = position_BT == last_B1
    ends_B = jnp.any(is_last_BT, axis=1)
    count_B = jnp.clip(length_B - begin_B, 0, T)
    hidden_BTE, cache = backbone.read(tokens_BT, before.cache, begin_B, count_B)

    def first_token() -> tuple[jax.Array, Logprobs | None]:
        """The first token of every row, as if its prompt ended here, and its log-probabilities."""
        here_B1 = jnp.clip(last_B1 - begin_B[:, None], 0, T - 1)
        last_B1E = jnp.take_along_axis(hidden_BTE, here_B1[..., None], axis=1)
        barred_BS = text_BS if engine.no_repeat_ngram_size else None
        place = after_text(sampling, barred_BS, last_B1[:, 0])
        if sampling.first_BW is not None:
            place = place._replace(allowed_BPW=sampling.first_BW[:, None])
        reported_B1V, chosen_B1V = adjust(
            engine, sampling, backbone, place, backbone.lm_head(last_B1E)
        )
        draws = sampling if engine.rule.noise is not None else None
        root_B1 = target_tokens(engine.kernels, chosen_B1V, last_B1, draws)
        n = engine.logprobs
        return root_B1[:, 0], None if n is None else logprobs_of(reported_B1V, root_B1, n)

    first = before.root_B, before.logprobs
    if all_end:
        first = first_token()
    else:
        first = lax.cond(
            jnp.any(ends_B), lambda: where_rows(ends_B, first_token(), first), lambda: first
        )
    first_B, _ = checked(first[0], engine.llama.config.vocab_size)
    next_BT = jnp.where(is_last_BT, first_B[:, None], next_BT)
    new = Committed(hidden_BTE, tokens_BT, next_BT, position_BT, count_B)
    drafter = engine.drafter.commit(variables["heads"], backbone, before.drafter, new)
    return PrefillState(cache, drafter, *first)


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
    prompt_BT, prompt_length_B = prompts.prompt_BT, prompts.prompt_length_B
    T = prompt_BT.shape[1]
    piece = min(T, PIECE)
    if T % piece:
        raise ValueError(f"{T} prompt tokens are not a multiple of a piece of {piece}")
    state = fresh_state(engine, slots, prompts.options, prompts.output_BO)
    if state.text_BS is not None:
        state = state.replace(text_BS=state.text_BS.at[:, :T].set(prompt_BT))
    following_BT = jnp.concatenate([prompt_BT[:, 1:], prompt_BT[:, :1]], axis=1)

    def read_next(i: jax.Array | int, before: PrefillState) -> PrefillState:
        begin = i * piece
        tokens_BT, next_BT = (
            lax.dynamic_slice_in_dim(x, begin, piece, axis=1)
            for x in (prompt_BT, following_BT)
        )
        begin_B = jnp.full_like(prompt_length_B, begin)
        next_piece = PromptPiece(tokens_BT, next_BT, begin_B, prompt_length_B)
        return read_piece(
            engine, variables, state.sampling, state.text_BS, before, next_piece, piece == T
        )

    progress = prefill_start(engine, state)
    if piece == T:
        progress = read_next(0, progress)
    else:  # pieces after the longest prompt are skipped
        pieces = -(-jnp.max(prompt_length_B) // piece)
        progress = lax.fori_loop(0, pieces, read_next, progress)
    return with_first_token(engine, state, progress, prompt_length_B)


def with_first_token(
    engine: Engine,
    state: DecodeState,
    progress: PrefillState,
    length_B: jax.Array,
    ends_B: jax.Array | bool = True,
) -> DecodeState:
    """The state after a piece of its prompts, with the first token of rows whose whole prompt has been read.

    Args:
      state: with the prompts up to the end of the piece in `text_BS`.
      length_B: tokens of the whole prompts.
      ends_B: whether a row's prompt ends in the piece.
    """
    root_B, broken_B = checked(progress.root_B, engine.llama.config.vocab_size)
    text_BS = state.text_BS
    if text_BS is not None:  # a prompt's next piece overwrites it
        text_BS = write_tokens(engine.kernels, text_BS, root_B[:, None], length_B)
    state = state.replace(
        cache=progress.cache,
        drafter=progress.drafter,
        length_B=length_B,
        root_B=root_B,
        text_BS=text_BS,
    )
    path_BL = jnp.zeros_like(state.histogram_BL).at[:, 0].set(root_B)
    n_B = jnp.broadcast_to(ends_B, root_B.shape).astype(jnp.int32)
    state, _ = emit(engine.kernels, state, path_BL, n_B, progress.logprobs, broken_B)
    return pin_state(engine.llama.mesh, state)


def where_rows(rows_B: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Select per row from trees of arrays [B, ...]: `new` where rows_B is True, else `old`."""

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(rows_B.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(pick, new, old)
