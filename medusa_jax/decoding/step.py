"""One decode step: draft, verify, accept, commit, append; on the device, with static shapes."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from medusa_jax.decoding.acceptance import Accepted, Drafts, Verified
from medusa_jax.decoding.copies import Nodes, fill_with_copies
from medusa_jax.decoding.logprobs import Logprobs, logprobs_of
from medusa_jax.decoding.penalties import count
from medusa_jax.decoding.places import adjust, after_nodes, after_text
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.decoding.stopping import BROKEN, RUNNING, count_until_end
from medusa_jax.heads.drafter import Committed, DraftRequest, Proposal, Ranked
from medusa_jax.heads.vocabulary import for_drafting
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.product import at_least_f32
from medusa_jax.sharding import Params
from medusa_jax.tree.tree import Tree


def decode_step(engine: Engine, variables: Params, state: DecodeState) -> DecodeState:
    """Draft the engine's tree, verify it in one backbone pass, keep the accepted path (Medusa 2.1).

    Args:
      engine: compile-time constants.
      variables: {"backbone": prepared backbone parameters, "heads": head parameters}.
      state: the rows, with `engine.free_slots` free slots in every running row.
    """
    drafts = draft(engine, variables, state, engine.tree)
    return after_draft(engine, variables, state, drafts)


def after_draft(
    engine: Engine, variables: Params, state: DecodeState, drafts: Drafts
) -> DecodeState:
    """The rest of a step: verify, accept, commit, append."""
    verified = verify(engine, variables, state, drafts)
    outcome = accept(engine, variables, state, verified)
    state = commit(engine, variables, state, verified, outcome)
    return append(engine, state, outcome)


@jax.named_scope("draft")
def draft(engine: Engine, variables: Params, state: DecodeState, tree: Tree) -> Drafts:
    """Fill every node with the head's guess of that rank (2.1.1) or with a copied token."""
    heads = variables["heads"]
    backbone = for_drafting(engine.backbone(variables), heads)

    def propose(drafted: Tree) -> Proposal:
        if drafted.n_nodes == 1:
            return Proposal(state.root_B[:, None])
        noise_BKO = None
        if engine.rule.noise is not None:
            position_BK = state.length_B[:, None] + 1 + jnp.arange(drafted.depth)[None, :]
            dtype = at_least_f32(engine.llama.dtype)
            noise_BKO = engine.rule.noise(
                state.sampling, position_BK, backbone.scored, dtype
            )
        rank = partial(rank_guesses, engine, state, backbone, noise_BKO)
        request = DraftRequest(state.root_B, drafted, rank)
        return engine.drafter.propose(heads, backbone, state.drafter, request)

    filled: Nodes = tree
    if tree.copied_C.size:
        assert state.text_BS is not None  # `Engine.keeps_text`
        texts = state.text_BS, state.length_B, state.status_B == RUNNING
        copied = fill_with_copies(tree, propose, *texts, state.predicted_BP)
        (nodes_BM, ranked), filled = copied
    else:
        nodes_BM, ranked = propose(tree)
    return Drafts(filled, nodes_BM.astype(jnp.int32), ranked, backbone.ids_O)


def rank_guesses(
    engine: Engine,
    state: DecodeState,
    backbone: Backbone,
    noise_BKO: jax.Array | None,
    depth: int,
    logits: jax.Array,
) -> Ranked:
    """Rank the guesses of a depth by logits / T + g like the verifier, at T = 0 by the logits.

    Only the text up to the root is known: it determines the n-grams barred at depth 1, and its counts
    penalise the guesses of all depths.

    Args:
      noise_BKO: the rule's noise of the scored tokens at every depth; None if it draws nothing.
      logits: [B, O] or [B, P, O].
    """
    text_BS = state.text_BS if engine.no_repeat_ngram_size and depth == 1 else None
    place = after_text(state.sampling, text_BS, state.length_B)
    B, O = logits.shape[0], logits.shape[-1]
    _, logits_BPO = adjust(
        engine, state.sampling, backbone, place, logits.reshape(B, -1, O)
    )
    scores_BPO = logits_BPO
    if noise_BKO is not None:
        temperature_B1 = state.sampling.temperature_B[:, None].astype(logits.dtype)
        scaled_BO = temperature_B1 * noise_BKO[:, depth - 1]
        scores_BPO = logits_BPO + scaled_BO[:, None]
    return Ranked(logits_BPO.reshape(logits.shape), scores_BPO.reshape(logits.shape))


def verify(
    engine: Engine, variables: Params, state: DecodeState, drafts: Drafts
) -> Verified:
    """One backbone pass over all nodes under the tree's mask (Medusa 2.1.2, figure 2)."""
    backbone, tree = engine.backbone(variables), drafts.tree
    nodes = drafts.nodes_BM, jnp.asarray(tree.depth_M), jnp.asarray(tree.mask_MM)
    with jax.named_scope("backbone"):
        hidden_BME, cache = backbone.read_tree(*nodes, state.cache, state.length_B)
    with jax.named_scope("lm_head"):
        logits_BMV = backbone.lm_head(hidden_BME)
    return Verified(drafts, hidden_BME, logits_BMV, cache, state.sampling, state.length_B)


class Outcome(NamedTuple):
    """The tokens that a step keeps.

    Attributes:
      path_BL, n_B, bonus_B: as in `Accepted`.
      emitted_BL: the accepted drafts, then the bonus token; entries after it are meaningless.
      copied_BL: whether a draft was copied from the text.
      logprobs: log-probabilities of `emitted_BL`; None unless the engine keeps them.
      broken_B: whether no token can follow the path; the bonus token is then meaningless.
    """

    path_BL: jax.Array
    n_B: jax.Array
    bonus_B: jax.Array
    emitted_BL: jax.Array
    copied_BL: jax.Array
    logprobs: Logprobs | None
    broken_B: jax.Array


def adjusted(
    engine: Engine, variables: Params, state: DecodeState, verified: Verified
) -> tuple[jax.Array, jax.Array]:
    """The logits after each node to report, and those to choose from (`places.adjust`), [B, M, V] each."""
    backbone = engine.backbone(variables)
    places = after_nodes(engine, state, verified.drafts)
    return adjust(engine, state.sampling, backbone, places, verified.logits_BMV)


@jax.named_scope("accept")
def accept(
    engine: Engine, variables: Params, state: DecodeState, verified: Verified
) -> Outcome:
    """Keep one path by the engine's rule."""
    nodes_BM, tree = verified.drafts.nodes_BM, verified.drafts.tree
    reported_BMV, chosen_BMV = adjusted(engine, variables, state, verified)
    verified = verified._replace(logits_BMV=chosen_BMV)
    accepted = engine.rule.accept(engine.kernels, verified)
    bonus_B, broken_B = checked(accepted.bonus_B, chosen_BMV.shape[-1])
    accepted = accepted._replace(bonus_B=bonus_B)
    emitted_BL = emitted_tokens(nodes_BM, accepted)
    logprobs = None
    if engine.logprobs is not None:  # a token's logits are those of the node before it
        path_BL1 = accepted.path_BL[..., None]
        logits_BLV = jnp.take_along_axis(reported_BMV, path_BL1, axis=1)
        logprobs = logprobs_of(logits_BLV, emitted_BL, engine.logprobs)
    copied_M = jnp.asarray(tree.copied_M)
    copied_BL = jnp.roll(copied_M[accepted.path_BL], -1, axis=1)
    return Outcome(*accepted, emitted_BL, copied_BL, logprobs, broken_B)


def checked(token_B: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Replace invalid tokens of `Kernels.best_token` by 0; also return which were invalid."""
    broken_B = token_B >= vocab_size
    return jnp.where(broken_B, 0, token_B), broken_B


def emitted_tokens(nodes_BM: jax.Array, accepted: Accepted) -> jax.Array:
    """The accepted drafts, then the bonus token [B, L]; entries after it are meaningless.

    Example: path [root r, x, w], n = 2, bonus b, L = 4: [x, w, b, .].
    """
    path_BL, n_B, bonus_B = accepted
    drafts_BL = jnp.take_along_axis(nodes_BM, path_BL, axis=1)
    shifted_BL = jnp.concatenate([drafts_BL[:, 1:], drafts_BL[:, :1]], axis=1)
    is_bonus_BL = jnp.arange(path_BL.shape[1])[None, :] == n_B[:, None]
    return jnp.where(is_bonus_BL, bonus_B[:, None], shifted_BL)


@jax.named_scope("commit")
def commit(
    engine: Engine,
    variables: Params,
    state: DecodeState,
    verified: Verified,
    outcome: Outcome,
) -> DecodeState:
    """Add the root and the accepted drafts to the text; the bonus token becomes the root."""
    path_BL, running_B = outcome.path_BL, state.status_B == RUNNING
    n_committed_B = jnp.where(running_B, outcome.n_B + 1, 0)
    new = Committed(
        jnp.take_along_axis(verified.hidden_BME, path_BL[..., None], axis=1),
        jnp.take_along_axis(verified.drafts.nodes_BM, path_BL, axis=1),
        outcome.emitted_BL,
        jnp.take_along_axis(verified.positions_BM, path_BL, axis=1),
        n_committed_B,
    )
    backbone, heads = engine.backbone(variables), variables["heads"]
    drafter = engine.drafter.commit(heads, backbone, state.drafter, new)
    cache = verified.cache
    if path_BL.shape[1] > 1:
        cache = engine.kernels.commit(cache, state.length_B, path_BL)
    text_BS = state.text_BS
    if text_BS is not None:
        written = text_BS, outcome.emitted_BL, state.length_B + 1
        text_BS = write_tokens(engine.kernels, *written)
    return state.replace(
        cache=cache,
        drafter=drafter,
        length_B=state.length_B + n_committed_B,
        root_B=jnp.where(running_B, outcome.bonus_B, state.root_B),
        text_BS=text_BS,
    )


@jax.named_scope("commit")
def append(engine: Engine, state: DecodeState, outcome: Outcome) -> DecodeState:
    """Append the accepted drafts and the bonus token to each running row, and count the step."""
    tokens = outcome.emitted_BL, outcome.n_B + 1, outcome.logprobs
    copied_BL, broken_B = outcome.copied_BL, outcome.broken_B
    new, count_B = emit(engine.kernels, state, *tokens, broken_B, copied_BL)
    # The state may have more bins than this tree needs.
    bin_BL = jnp.arange(1, state.histogram_BL.shape[1] + 1)[None, :] == count_B[:, None]
    return new.replace(
        steps_B=state.steps_B + (state.status_B == RUNNING),
        histogram_BL=state.histogram_BL + bin_BL.astype(jnp.int32),
    )


def emit(
    kernels: Kernels,
    state: DecodeState,
    emitted_BL: jax.Array,
    n_B: jax.Array,
    logprobs: Logprobs | None,
    broken_B: jax.Array,
    copied_BL: jax.Array | bool = False,
) -> tuple[DecodeState, jax.Array]:
    """Write the first n tokens of each running row to its output and check whether it ends.

    The first n - 1 are drafts of depth 1, 2, ..., of -1, -2, ... if copied; the n-th is the verifier's.

    Args:
      logprobs: log-probabilities of those tokens, if the engine keeps them.
      broken_B: whether the n-th is none: the row ends before it.
      copied_BL: whether a draft was copied from the text.

    Returns: the state, and the number of tokens appended to each row.
    """
    # All L entries are written; the next step overwrites those after `n_new`.
    tokens_BO = write_tokens(kernels, state.tokens_BO, emitted_BL, state.n_new_B)
    depth_L = jnp.arange(1, emitted_BL.shape[1] + 1)
    depth_BL = jnp.where(copied_BL, -depth_L, depth_L)
    depth_BL = jnp.where(depth_L[None, :] < n_B[:, None], depth_BL, 0)
    depth_BO = write_tokens(kernels, state.depth_BO, depth_BL, state.n_new_B)
    ends_BL = jnp.any(emitted_BL[:, :, None] == state.end_BQ[:, None, :], axis=-1)
    n_B, room_B = n_B - broken_B.astype(jnp.int32), state.limit_B - state.n_new_B
    count_B, status_B = count_until_end(ends_BL, n_B, room_B)
    status_B = jnp.where(broken_B & (status_B == RUNNING), BROKEN, status_B)
    running_B = state.status_B == RUNNING
    count_B = jnp.where(running_B, count_B, 0)
    sampling = state.sampling
    sampling = sampling.replace(penalties=count(sampling.penalties, emitted_BL, count_B))
    if logprobs is not None:
        logprobs = jax.tree.map(
            lambda old, new: write_tokens(kernels, old, new, state.n_new_B),
            state.logprobs,
            logprobs,
        )
    new = state.replace(
        sampling=sampling,
        tokens_BO=tokens_BO,
        depth_BO=depth_BO,
        logprobs=logprobs,
        n_new_B=state.n_new_B + count_B,
        status_B=jnp.where(running_B, status_B, state.status_B),
    )
    return new, count_B


def write_tokens(
    kernels: Kernels, row_BO: jax.Array, new_BL: jax.Array, at_B: jax.Array
) -> jax.Array:
    """Write L new entries to row b from index `at[b]` on; requires at + L <= O.

    Entries may be numbers or arrays: [B, O, ...] and [B, L, ...].
    """
    return kernels.write_rows(row_BO, new_BL, at_B, axis=1)
