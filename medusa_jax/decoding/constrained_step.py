"""The device's part in steps of rows with constraints (`constrained.py` has the host's).

Where a program can call the host, `host_step` runs in the loop on the device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.decoding.acceptance import Drafts
from medusa_jax.decoding.state import DecodeState, Engine, Progress, progress_of
from medusa_jax.decoding.step import after_draft, draft
from medusa_jax.decoding.stopping import PAUSED, RUNNING
from medusa_jax.decoding.token_sets import NO_TOKEN, words
from medusa_jax.host_calls import ask
from medusa_jax.model.kernels import Kernels
from medusa_jax.sharding import Params, on_all, pin_state
from medusa_jax.tree.tree import Tree

# Guesses after each node, from which the host replaces forbidden drafts.
GUESSES = 16


class HostInputs(NamedTuple):
    """Results of a draft that the host reads before the step.

    Attributes:
      progress: progress of the state.
      drafts: the drafted tree of the step.
      guesses_BMK: the best tokens after each node by the scores of its depth, best first; NO_TOKEN
        where the drafter has none.
    """

    progress: Progress
    drafts: Drafts
    guesses_BMK: jax.Array


def next_inputs(engine: Engine, variables: Params, state: DecodeState) -> HostInputs:
    """Draft the next tree, and copy the progress for the host."""
    drafts, guesses_BMK = draft_and_guess(engine, variables, state)
    progress = jax.tree.map(jnp.copy, progress_of(state))
    progress, guesses_BMK = on_all(engine.llama.mesh, (progress, guesses_BMK))
    return HostInputs(progress, drafts, guesses_BMK)


def draft_and_guess(
    engine: Engine, variables: Params, state: DecodeState
) -> tuple[Drafts, jax.Array]:
    """Draft the next tree, with the guesses after its nodes."""
    # The host needs one fixed tree, so no step may choose between the chain and the spares.
    tree = engine.tree.fixed
    drafts = draft(engine, variables, state, tree)
    guesses_BMK = guesses_after(engine.kernels, tree, drafts)
    if not engine.rule.by_drafts:  # only such rules read the scores
        drafts = drafts._replace(ranked=())
    return drafts, guesses_BMK


def guesses_after(kernels: Kernels, tree: Tree, drafts: Drafts) -> jax.Array:
    """The best tokens after each node, [B, M, K].

    Nodes that a drafter does not score, such as copied ones, get the guesses of the first scored node
    of their depth.
    """
    B, M = drafts.nodes_BM.shape
    no_tokens = jnp.full((B, 1, GUESSES), NO_TOKEN)
    guesses, place_M, n = [no_tokens], np.zeros(M, np.int32), 1
    drafted_N = np.setdiff1d(np.arange(M), tree.copied_C)
    for depth, (_, scores) in enumerate(drafts.ranked):
        scores_RO = scores.reshape(-1, scores.shape[-1])
        K = min(GUESSES, scores_RO.shape[1])
        tokens_RK = places_RK = kernels.top_k(scores_RO, K)
        if drafts.ids_O is not None:
            tokens_RK = drafts.ids_O[places_RK]
        best_RK = jnp.take_along_axis(scores_RO, places_RK, axis=1)
        tokens_RK = jnp.where(jnp.isfinite(best_RK), tokens_RK, NO_TOKEN)
        tokens_BPK = tokens_RK.reshape(B, -1, K)
        P, pad_K = tokens_BPK.shape[1], ((0, 0), (0, 0), (0, GUESSES - K))
        guesses.append(jnp.pad(tokens_BPK, pad_K, constant_values=NO_TOKEN))
        place_M[tree.depth_M == depth] = n
        parent_P = drafted_N[tree.drafted.parents(depth)]
        place_M[parent_P] = n + (np.arange(len(parent_P)) if P > 1 else 0)
        n += P
    return jnp.concatenate(guesses, axis=1)[:, place_M].astype(jnp.int32)


def constrained_step(
    engine: Engine,
    variables: Params,
    state: DecodeState,
    drafts: Drafts,
    status_B: jax.Array,
) -> DecodeState:
    """A step with the host's part.

    Args:
      drafts: filled by the host, which also says what may follow each node.
      status_B: the new status of running rows; only those with RUNNING take the step.
    """
    status_B = jnp.where(state.status_B == RUNNING, status_B, state.status_B)
    state = state.replace(status_B=status_B)
    state = after_draft(engine, variables, state, drafts)
    return pin_state(engine.llama.mesh, state)


def host_step(engine: Engine, variables: Params, state: DecodeState) -> DecodeState:
    """A step that calls the host for its part (`constrained.answer`). If that failed, rows are PAUSED."""
    drafts, guesses_BMK = draft_and_guess(engine, variables, state)
    B, M = drafts.nodes_BM.shape
    read = state.tokens_BO, state.n_new_B, state.status_B, drafts.nodes_BM, guesses_BMK
    shapes = (1,), (B,), (B, M), (B, M, words(engine.llama.config.vocab_size))
    assert state.host_1 is not None
    ready_1, status_B, nodes_BM, bits_BMW = ask(state.host_1, read, shapes)
    status_B = jnp.where(ready_1 > 0, status_B, PAUSED)
    allowed_BMW = lax.bitcast_convert_type(bits_BMW, jnp.uint32)
    drafts = drafts._replace(nodes_BM=nodes_BM, allowed_BMW=allowed_BMW)
    return constrained_step(engine, variables, state, drafts, status_B)
