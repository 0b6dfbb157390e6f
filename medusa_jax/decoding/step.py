"""One decode step: draft, verify, accept, commit, append; on the device, with static shapes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.decoding.acceptance import Accepted, Verified
from medusa_jax.decoding.copying import TreeArrays, with_copies
from medusa_jax.decoding.logprobs import Logprobs, logprobs_of
from medusa_jax.decoding.masks import only
from medusa_jax.decoding.penalties import counted, counts_down_paths, penalised
from medusa_jax.decoding.repeats import node_texts, without_repeats
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.decoding.stopping import LIMIT, RUNNING, completes_stop, count_until_end
from medusa_jax.devices.platforms import platform
from medusa_jax.heads.drafter import Backbone, Committed, DraftRequest
from medusa_jax.heads.extra_rows import WithExtraRows
from medusa_jax.heads.vocabulary import for_drafting
from medusa_jax.model.product import at_least_f32
from medusa_jax.sharding import Params, PyTree
from medusa_jax.tree.tree import Tree


def decode_step(
    engine: Engine, variables: Params, state: DecodeState, tree: Tree | None = None
) -> DecodeState:
    """Draft a tree, verify it in one backbone pass, keep the accepted path (Medusa 2.1).

    Args:
      engine: compile-time constants.
      variables: {"backbone": prepared backbone parameters, "heads": head parameters}.
      state: the rows, with `engine.n_rows` free slots in every running row.
      tree: the tree's arrays, by default the engine's as constants. Property tests pass traced
        arrays instead, so that many trees share one compiled program.
    """
    tree = engine.tree if tree is None else tree
    backbone = Backbone(engine.llama, variables["backbone"])
    heads = variables["heads"]
    with jax.named_scope("draft"):
        drafts, filled = draft(engine, heads, backbone, state, tree)
    verified = verify(engine, backbone, state, filled, drafts)
    return settle(engine, variables, state, verified)


def settle(
    engine: Engine,
    variables: Params,
    state: DecodeState,
    verified: Verified,
    allowed_BMW: jax.Array | None = None,
) -> DecodeState:
    """Accept, commit and append: what follows the backbone's pass.

    Args:
      allowed_BMW: bits of the tokens that may follow each node (`masks`); None: all.
    """
    backbone, heads = Backbone(engine.llama, variables["backbone"]), variables["heads"]
    scored = with_penalties(verified)
    scored = scored._replace(logits_BMV=only(scored.logits_BMV, allowed_BMW))
    with jax.named_scope("accept"):
        accepted = engine.rule.accept(scored)
        emitted_BL = emitted_tokens(verified, accepted)
    logprobs = None
    if engine.logprobs is not None:  # a token's logits are those of the node before it
        logits_BLV = jnp.take_along_axis(
            verified.logits_BMV, accepted.path_BL[..., None], axis=1
        )
        logprobs = logprobs_of(logits_BLV, emitted_BL, engine.logprobs)
    with jax.named_scope("commit"):
        state = commit(engine, heads, backbone, state, verified, accepted, emitted_BL)
        return append(state, emitted_BL, accepted.n_B + 1, logprobs)


def with_penalties(verified: Verified) -> Verified:
    """The verified tree for the acceptance rule: logits with the penalties of each node's path."""
    penalties = verified.sampling.penalties
    if penalties is None:
        return verified
    counts_BMV = counts_down_paths(penalties.counts_BV, verified.nodes_BM, verified.tree)
    depth_M = verified.tree.depth_M
    logits_BMV = penalised(verified.logits_BMV, penalties, counts_BMV, depth_M)
    return verified._replace(logits_BMV=logits_BMV)


class Drafts(NamedTuple):
    """A drafted tree.

    Attributes:
      nodes_BM: token ids of all nodes, the root first.
      noise_BLV: the rule's noise by depth, or None.
      logits: by depth, the heads' logits, with penalties; none if the tree has spares.
      scores: by depth, what ranked the drafts: these logits with the rule's noise; likewise.
      ids_O: token ids of both; None: all tokens.
    """

    nodes_BM: jax.Array
    noise_BLV: jax.Array | None
    logits: dict[int, jax.Array]
    scores: dict[int, jax.Array]
    ids_O: jax.Array | None


def draft(
    engine: Engine, heads: Params, backbone: Backbone, state: DecodeState, tree: Tree
) -> tuple[Drafts, Tree | TreeArrays]:
    """Fill every node: with the head's guess of the node's rank (2.1.1), or with a copied token.

    Returns: the drafts, and the tree that they fill: the given one, or that with its spares.
    """
    backbone = for_drafting(backbone, heads)
    # g[pos] from the position after the root on: a child at depth d is at length + d, so
    # noise_BLV[:, d - 1] decides its target token and its rank as a draft.
    noise_BLV = None
    if engine.rule.noise is not None:
        position_BL = state.length_B[:, None] + 1 + jnp.arange(tree.path_length)[None, :]
        V, dtype = engine.llama.config.vocab_size, at_least_f32(engine.llama.dtype)
        with jax.named_scope("sampling"):
            noise_BLV = engine.rule.noise(state.sampling, position_BL, V, dtype)
    ranked: dict[int, jax.Array] = {}
    scores: dict[int, jax.Array] = {}
    barring_BS = state.text_BS if engine.no_repeat_ngram_size else None
    penalties = state.sampling.penalties
    if penalties is not None:
        penalties = penalties.at(backbone.of_scored)

    def rank_scores(depth: int, logits: jax.Array) -> jax.Array:
        """Scores in the order of logits / T + g, like the verifier's (T = 0: of the logits)."""
        if depth == 1 and barring_BS is not None:  # the text up to the root is known
            logits_B1O = logits.reshape(logits.shape[0], 1, -1)
            text_B1S, last_B1 = barring_BS[:, None], state.length_B[:, None]
            n_gram, barred_B = engine.no_repeat_ngram_size, state.sampling.barred_B
            barred_B1O = without_repeats(
                logits_B1O, text_B1S, last_B1, n_gram, backbone.places, barred_B
            )
            logits = barred_B1O.reshape(logits.shape)
        if penalties is not None:  # of the text up to the root, at all depths
            logits_BPO = logits.reshape(logits.shape[0], -1, logits.shape[-1])
            logits = penalised(logits_BPO, penalties).reshape(logits.shape)
        ranked[depth] = scores[depth] = logits
        if noise_BLV is not None:
            temperature_B1 = state.sampling.temperature_B[:, None].astype(logits.dtype)
            scaled_BO = temperature_B1 * backbone.of_scored(noise_BLV[:, depth - 1])
            middle = (1,) * (logits.ndim - 2)
            scaled = scaled_BO.reshape(scaled_BO.shape[0], *middle, scaled_BO.shape[1])
            scores[depth] = logits + scaled
        return scores[depth]

    def propose(drafted: Tree) -> jax.Array:
        if drafted.n_nodes == 1:
            return state.root_B[:, None]
        request = DraftRequest(state.root_B, drafted, rank_scores)
        nodes_BM = engine.drafter.propose(heads, backbone, state.drafter, request)
        return nodes_BM.astype(jnp.int32)

    filled: Tree | TreeArrays = tree
    if tree.copied_C.size:
        assert state.text_BS is not None  # `Engine.keeps_text`
        running_B = state.status_B == RUNNING
        nodes_BM, filled = with_copies(
            tree, propose, state.text_BS, state.length_B, running_B
        )
        if tree.spares:  # logits of one of two branches: no rule that reads them has spares
            ranked, scores = {}, {}
    else:
        nodes_BM = propose(tree)
    return Drafts(nodes_BM, noise_BLV, ranked, scores, backbone.ids_O), filled


def verify(
    engine: Engine,
    backbone: Backbone,
    state: DecodeState,
    tree: Tree | TreeArrays,
    drafts: Drafts,
) -> Verified:
    """One backbone pass over all nodes under the tree's mask (Medusa 2.1.2, figure 2)."""
    M = tree.n_nodes
    tokens_BR, depth_R, mask_RR = rows_of_pass(
        engine.extra, state.drafter, tree, drafts.nodes_BM
    )
    positions_BR = state.length_B[:, None] + depth_R[None, :]
    with jax.named_scope("backbone"):
        hidden_BRE, cache = backbone.decode(
            tokens_BR, positions_BR, state.cache, state.length_B, mask_RR
        )
    hidden_BME, scored_BRE = hidden_BRE[:, :M], hidden_BRE
    if engine.extra is not None:  # one pass over the LM head for both
        extra_BUE = hidden_BRE[:, -engine.extra.extra_rows.n_scored :]
        scored_BRE = jnp.concatenate([hidden_BME, extra_BUE], axis=1)
    with jax.named_scope("lm_head"):
        logits_BRV = backbone.lm_head(scored_BRE)
    logits_BMV = logits_BRV[:, :M]
    if engine.no_repeat_ngram_size and state.text_BS is not None:
        texts = node_texts(state.text_BS, state.length_B, drafts.nodes_BM, tree)
        n_gram, barred_B = engine.no_repeat_ngram_size, state.sampling.barred_B
        logits_BMV = without_repeats(logits_BMV, *texts, n_gram, barred_B=barred_B)
    return Verified(
        tree=tree,
        nodes_BM=drafts.nodes_BM,
        positions_BM=positions_BR[:, :M],
        hidden_BME=hidden_BME,
        logits_BMV=logits_BMV,
        extra_BUV=logits_BRV[:, M:],
        cache=cache,
        sampling=state.sampling,
        length_B=state.length_B,
        noise_BLV=drafts.noise_BLV,
        draft_logits=drafts.logits,
        draft_ids_O=drafts.ids_O,
    )


def rows_of_pass(
    extra: WithExtraRows | None, state: PyTree, tree: Tree | TreeArrays, nodes_BM: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, depths and mask of all rows of a pass: tree nodes, then the drafter's extra rows.

    Example: a chain of two nodes and two extra rows, the second of which sees the first:

        root   1 . . .
        node   1 1 . .
        row    1 . 1 .
        row    1 . 1 1
    """
    depth_M, mask_MM = jnp.asarray(tree.depth_M), jnp.asarray(tree.mask_MM)
    if extra is None:
        return nodes_BM, depth_M, mask_MM
    rows = extra.extra_rows
    tokens_BR = jnp.concatenate([nodes_BM, extra.extra_tokens(state)], axis=1)
    depth_R = jnp.concatenate([depth_M, jnp.asarray(rows.depth_X)])
    M, X = tree.n_nodes, len(rows.depth_X)
    mask_RR = jnp.pad(mask_MM, (0, X)).at[M:, M:].set(jnp.asarray(rows.mask_XX))
    return tokens_BR, depth_R, mask_RR.at[M:, 0].set(True)


def emitted_tokens(verified: Verified, accepted: Accepted) -> jax.Array:
    """The accepted drafts, then the bonus token [B, L]; entries after it are meaningless.

    Example: path [root r, x, w], n = 2, bonus b, L = 4: [x, w, b, .].
    """
    path_BL, n_B, bonus_B = accepted
    drafts_BL = jnp.take_along_axis(verified.nodes_BM, path_BL, axis=1)
    shifted_BL = jnp.concatenate([drafts_BL[:, 1:], drafts_BL[:, :1]], axis=1)
    is_bonus_BL = jnp.arange(path_BL.shape[1])[None, :] == n_B[:, None]
    return jnp.where(is_bonus_BL, bonus_B[:, None], shifted_BL)


def commit(
    engine: Engine,
    heads: Params,
    backbone: Backbone,
    state: DecodeState,
    verified: Verified,
    accepted: Accepted,
    emitted_BL: jax.Array,
) -> DecodeState:
    """Add the root and the accepted drafts to the text; the bonus token becomes the root."""
    path_BL, n_B, bonus_B = accepted
    running_B = state.status_B == RUNNING
    taken_B = jnp.where(running_B, n_B + 1, 0)
    hidden_BLE = jnp.take_along_axis(verified.hidden_BME, path_BL[..., None], axis=1)
    position_BL = jnp.take_along_axis(verified.positions_BM, path_BL, axis=1)
    drafter = state.drafter
    if engine.extra is not None:
        drafter = engine.extra.learn(drafter, state.root_B, verified.extra_BUV)
    token_BL = jnp.take_along_axis(verified.nodes_BM, path_BL, axis=1)
    new = Committed(hidden_BLE, token_BL, emitted_BL, position_BL, taken_B)
    drafter = engine.drafter.commit(heads, backbone, drafter, new)
    cache = verified.cache
    if path_BL.shape[1] > 1:
        cache = cache.commit(state.length_B, path_BL)
    text_BS = state.text_BS
    if text_BS is not None:
        text_BS = write_tokens(text_BS, emitted_BL, state.length_B + 1)
    return state.replace(
        cache=cache,
        drafter=drafter,
        length_B=state.length_B + taken_B,
        root_B=jnp.where(running_B, bonus_B, state.root_B),
        text_BS=text_BS,
    )


def append(
    state: DecodeState, emitted_BL: jax.Array, n_B: jax.Array, logprobs: Logprobs | None
) -> DecodeState:
    """Append the first n tokens of a step to each running row, and count the step.

    The first n - 1 are accepted drafts of depth 1, 2, ...; the n-th is the bonus token.
    """
    new, count_B = emit(state, emitted_BL, n_B, logprobs)
    # The state may have more bins than this tree needs.
    bin_BL = jnp.arange(1, state.histogram_BL.shape[1] + 1)[None, :] == count_B[:, None]
    steps_B = state.steps_B + (state.status_B == RUNNING)
    last_B = (new.status_B == RUNNING) & (steps_B >= state.max_steps_B)
    return new.replace(
        steps_B=steps_B,
        status_B=jnp.where(last_B, LIMIT, new.status_B),
        histogram_BL=state.histogram_BL + bin_BL.astype(jnp.int32),
    )


def emit(
    state: DecodeState, emitted_BL: jax.Array, n_B: jax.Array, logprobs: Logprobs | None
) -> tuple[DecodeState, jax.Array]:
    """Write the first n tokens of each running row to its output and check whether it ends.

    Args:
      logprobs: log-probabilities of those tokens, if the engine keeps them.

    Returns: the state, and the number of tokens kept in each row.
    """
    # Rows write all L entries; the next step overwrites those after `n_new`.
    tokens_BO = write_tokens(state.tokens_BO, emitted_BL, state.n_new_B)
    depth_L = jnp.arange(1, emitted_BL.shape[1] + 1)
    depth_BL = jnp.where(depth_L[None, :] < n_B[:, None], depth_L[None, :], 0)
    depth_BO = write_tokens(state.depth_BO, depth_BL, state.n_new_B)
    stops_BL = completes_stop(state.stop_BQW, tokens_BO, emitted_BL, state.n_new_B)
    count_B, status_B = count_until_end(stops_BL, n_B, state.limit_B - state.n_new_B)
    running_B = state.status_B == RUNNING
    count_B = jnp.where(running_B, count_B, 0)
    sampling = state.sampling
    sampling = sampling.replace(penalties=counted(sampling.penalties, emitted_BL, count_B))
    if logprobs is not None:
        logprobs = jax.tree.map(
            lambda old, new: write_tokens(old, new, state.n_new_B), state.logprobs, logprobs
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


def write_tokens(row_BO: jax.Array, new_BL: jax.Array, at_B: jax.Array) -> jax.Array:
    """Write L new entries to row b from index `at[b]` on; requires at + L <= O.

    Entries may be numbers or arrays: [B, O, ...] and [B, L, ...].
    """
    new_BL = new_BL.astype(row_BO.dtype)
    if platform() == "tpu":  # without a scatter, as in `cache.write_rows`
        rest = (jnp.zeros((), at_B.dtype),) * (row_BO.ndim - 2)
        for b in range(row_BO.shape[0]):
            at = (jnp.asarray(b, at_B.dtype), at_B[b], *rest)
            row_BO = lax.dynamic_update_slice(row_BO, new_BL[b : b + 1], at)
        return row_BO
    write = jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, 0))
    return write(row_BO, new_BL, at_B)
