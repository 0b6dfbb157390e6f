"""One decode step: draft, verify, accept, commit, append; on the device and static in shape."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from medusa_jax.decoding.accept import (
    Accepted,
    accept_targets,
    accept_typical,
    target_tokens,
)
from medusa_jax.decoding.rejection import accept_rejection, draft_noise
from medusa_jax.decoding.repeats import texts_behind, without_repeats
from medusa_jax.decoding.sampling import Sampling, gumbel
from medusa_jax.decoding.stopping import RUNNING, completes_stop, count_until_end
from medusa_jax.heads.drafter import Base, Drafter
from medusa_jax.model.cache import KVCache
from medusa_jax.model.llama import Llama
from medusa_jax.model.product import at_least_f32
from medusa_jax.sharding import pin_state
from medusa_jax.tree import Tree


@dataclass(frozen=True)
class Engine:
    """Everything about decoding that is fixed at compile time (a static argument of jit).

    Attributes:
      llama: the backbone, for prepared (fused) parameters.
      drafter: the draft heads.
      tree: the draft tree; the empty one is autoregressive decoding.
      acceptance: "greedy", "sampled", "rejection" (which makes the tree dense) or "typical".
      no_repeat_ngram_size: n-grams of this size stand in a text at most once; 0 bars nothing.
    """

    llama: Llama
    drafter: Drafter
    tree: Tree
    acceptance: str = "greedy"
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        if self.acceptance == "rejection":  # siblings are successive draws, none left out
            object.__setattr__(self, "tree", self.tree.dense)


class DecodeState(struct.PyTreeNode):
    """One batch of rows in flight; every array is static in shape.

    Attributes:
      cache: keys and values; slots [0, length) of a row are committed.
      drafter: the drafter's own state.
      sampling: per-row sampling parameters.
      tokens_BO: emitted tokens; [0, n_new) of a row count.
      depth_BO: for each of them the tree depth it was accepted at, 0 where the verifier chose
        it itself (the first token and the bonus tokens).
      n_new_B: tokens emitted so far, the one from prefill included.
      limit_B: most tokens the row may emit.
      stop_BQW: token sequences that end the row, see `stopping.pack_stops`.
      length_B: text positions in the cache; the root is not in it yet.
      root_B: the last emitted token.
      status_B: RUNNING, STOPPED (EOS or stop sequence) or LIMIT (`stopping`).
      steps_B: decode steps the row took part in.
      histogram_BL: steps that appended 1, 2, ..., L tokens.
      text_BS: prompt and emitted tokens at their positions, the root the last that counts;
        None unless n-grams are barred. S leaves room for a path behind the cache's slots.
    """

    cache: KVCache
    drafter: Any
    sampling: Sampling
    tokens_BO: jax.Array
    depth_BO: jax.Array
    n_new_B: jax.Array
    limit_B: jax.Array
    stop_BQW: jax.Array
    length_B: jax.Array
    root_B: jax.Array
    status_B: jax.Array
    steps_B: jax.Array
    histogram_BL: jax.Array
    text_BS: jax.Array | None = None


class Progress(struct.PyTreeNode):
    """What the host may look at while the next loop runs: copies, never donated."""

    tokens_BO: jax.Array
    depth_BO: jax.Array
    n_new_B: jax.Array
    length_B: jax.Array
    status_B: jax.Array
    steps_B: jax.Array
    histogram_BL: jax.Array


def progress_of(state: DecodeState) -> Progress:
    """The host's view of a state."""
    return Progress(
        **{name: getattr(state, name) for name in Progress.__dataclass_fields__}
    )


def write_tokens(row_BO: jax.Array, new_BL: jax.Array, at_B: jax.Array) -> jax.Array:
    """Row b with its L new entries from place `at[b]` on; the caller keeps at + L <= O."""
    write = jax.vmap(lambda row, new, at: lax.dynamic_update_slice(row, new, (at,)))
    return write(row_BO, new_BL.astype(row_BO.dtype), at_B)


def append(state: DecodeState, emitted_BL: jax.Array, n_B: jax.Array) -> DecodeState:
    """Write the first n tokens of each running row behind its text and see whether it ends.

    The first n - 1 are accepted drafts of depth 1, 2, ...; the n-th is the verifier's own.
    """
    # Rows write all L; what lies behind `n_new` is overwritten by the next step.
    tokens_BO = write_tokens(state.tokens_BO, emitted_BL, state.n_new_B)
    depth_L = jnp.arange(1, emitted_BL.shape[1] + 1)
    depth_BL = jnp.where(depth_L[None, :] < n_B[:, None], depth_L[None, :], 0)
    depth_BO = write_tokens(state.depth_BO, depth_BL, state.n_new_B)
    stops_BL = completes_stop(state.stop_BQW, tokens_BO, emitted_BL, state.n_new_B)
    count_B, status_B = count_until_end(stops_BL, n_B, state.limit_B - state.n_new_B)
    running_B = state.status_B == RUNNING
    count_B = jnp.where(running_B, count_B, 0)
    return state.replace(
        tokens_BO=tokens_BO,
        depth_BO=depth_BO,
        n_new_B=state.n_new_B + count_B,
        status_B=jnp.where(running_B, status_B, state.status_B),
    )


def decode_step(
    engine: Engine, variables: dict[str, Any], state: DecodeState, tree: Any = None
) -> DecodeState:
    """Draft a tree, verify it in one backbone pass, keep the accepted path (Medusa 2.1).

    Args:
      engine: compile-time constants.
      variables: {"base": prepared backbone parameters, "heads": head parameters}.
      state: rows in flight, with room for M more slots in every running row.
      tree: the tree's arrays, by default the engine's own as constants. Property tests pass
        traced arrays instead, so that one compilation serves many trees.
    """
    tree = engine.tree if tree is None else tree
    base = Base(engine.llama, variables["base"])
    heads = variables["heads"]
    depth_M = jnp.asarray(tree.depth_M)
    L = tree.path_length
    sampling = state.sampling
    # g[pos] of the root's position and on: a child at depth d sits at length + d, so its target
    # token and its rank as a draft are decided by noise_BLV[:, d - 1]. Rejection sampling ranks
    # drafts by noise of another stream: they must be draws independent of the verifier's.
    noise_BLV = None
    if engine.acceptance in ("sampled", "rejection"):
        position_BL = state.length_B[:, None] + 1 + jnp.arange(L)[None, :]
        V, dtype = engine.llama.config.vocab_size, at_least_f32(engine.llama.dtype)
        if engine.acceptance == "sampled":
            noise_BLV = gumbel(sampling.key_B, position_BL, V, dtype)
        else:
            noise_BLV = draft_noise(sampling, position_BL, V, dtype)
    draft_logits: dict[int, jax.Array] = {}
    text_BS = state.text_BS

    def rank_scores(depth: int, logits: jax.Array) -> jax.Array:
        """Order of logits / T + g, as the verifier will see it (rows of T = 0: of the logits)."""
        if depth == 1 and text_BS is not None:  # the text behind the root is known
            logits_B1V = logits.reshape(logits.shape[0], 1, -1)
            known = (text_BS[:, None], state.length_B[:, None], engine.no_repeat_ngram_size)
            logits = without_repeats(logits_B1V, *known).reshape(logits.shape)
        draft_logits[depth] = logits
        if noise_BLV is None:
            return logits
        scaled_BV = (
            sampling.temperature_B[:, None].astype(logits.dtype) * noise_BLV[:, depth - 1]
        )
        middle = (1,) * (logits.ndim - 2)
        return logits + scaled_BV.reshape(scaled_BV.shape[0], *middle, scaled_BV.shape[1])

    # Draft.
    nodes_BM = engine.drafter.propose(
        heads, base, state.drafter, state.root_B, tree, rank_scores
    ).astype(jnp.int32)

    # Verify.
    positions_BM = state.length_B[:, None] + depth_M[None, :]
    hidden_BMD, cache = base.decode(
        nodes_BM, positions_BM, state.cache, state.length_B, jnp.asarray(tree.mask_MM)
    )
    logits_BMV = base.lm_head(hidden_BMD)
    if text_BS is not None:
        texts = texts_behind(text_BS, state.length_B, nodes_BM, tree)
        logits_BMV = without_repeats(logits_BMV, *texts, engine.no_repeat_ngram_size)

    # Accept.
    accepted: Accepted
    if engine.acceptance == "typical":
        accepted = accept_typical(nodes_BM, logits_BMV, tree, sampling)
    elif engine.acceptance == "rejection":
        accepted = accept_rejection(
            nodes_BM, logits_BMV, tree, sampling, state.length_B, draft_logits
        )
    else:
        if noise_BLV is None:
            targets_BM = target_tokens(logits_BMV, positions_BM, None)
        else:
            by_depth = (noise_BLV, depth_M)
            targets_BM = target_tokens(logits_BMV, positions_BM, sampling, by_depth)
        accepted = accept_targets(nodes_BM, targets_BM, tree)
    path_BL, n_B, bonus_B = accepted

    # Commit: the root and the accepted drafts enter the text, the bonus token is the next root.
    running_B = state.status_B == RUNNING
    drafts_BL = jnp.take_along_axis(nodes_BM, path_BL, axis=1)
    shifted_BL = jnp.concatenate([drafts_BL[:, 1:], drafts_BL[:, :1]], axis=1)
    is_bonus_BL = jnp.arange(L)[None, :] == n_B[:, None]
    emitted_BL = jnp.where(is_bonus_BL, bonus_B[:, None], shifted_BL)
    taken_B = jnp.where(running_B, n_B + 1, 0)
    hidden_BLD = jnp.take_along_axis(hidden_BMD, path_BL[..., None], axis=1)
    position_BL = jnp.take_along_axis(positions_BM, path_BL, axis=1)
    drafter = engine.drafter.commit(
        heads, base, state.drafter, hidden_BLD, emitted_BL, position_BL, taken_B
    )
    if L > 1:
        cache = cache.commit(state.length_B, path_BL)

    # Append.
    if text_BS is not None:
        text_BS = write_tokens(text_BS, emitted_BL, state.length_B + 1)
    new = append(state, emitted_BL, n_B + 1)
    count_B = new.n_new_B - state.n_new_B
    bin_BL = jnp.arange(1, L + 1)[None, :] == count_B[:, None]
    return new.replace(
        cache=cache,
        drafter=drafter,
        length_B=state.length_B + taken_B,
        root_B=jnp.where(running_B, bonus_B, state.root_B),
        steps_B=state.steps_B + running_B,
        histogram_BL=state.histogram_BL + bin_BL.astype(jnp.int32),
        text_BS=text_BS,
    )


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode_loop(
    engine: Engine, variables: dict[str, Any], state: DecodeState, max_steps: jax.Array
) -> tuple[DecodeState, Progress]:
    """Steps until every row has ended, a running row lacks room in the cache, or `max_steps`.

    Compiled once per cache size: the cost of a step follows the slots there are, so the
    drivers grow the cache with the text.
    """
    slots, M = state.cache.slots, engine.tree.n_nodes

    def more(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        step, state = carry
        running_B = state.status_B == RUNNING
        fits = jnp.max(jnp.where(running_B, state.length_B, 0)) + M <= slots
        return (step < max_steps) & jnp.any(running_B) & fits

    def one(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        step, state = carry
        state = decode_step(engine, variables, state)
        return step + 1, pin_state(engine.llama.mesh, state)

    _, state = lax.while_loop(more, one, (jnp.zeros((), jnp.int32), state))
    state = pin_state(engine.llama.mesh, state)
    return state, jax.tree.map(jnp.copy, progress_of(state))
