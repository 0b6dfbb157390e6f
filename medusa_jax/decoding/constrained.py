"""Decode steps of rows with a constraint: the host computes which tokens may follow.

A constraint is part of the verifier: the target token after a node is chosen among the
tokens that the constraint allows after the node's path, so drafted text equals plain
decoding's with the same constraint. Before a step the host, which has the constraints (`Guide`), fills a chain of the
tree with the tokens that are forced, replaces forbidden drafts, and computes the allowed tokens after all nodes, as bits:

    host    forced tokens, bits of every node | dispatch | text of the last step | wait
    device                                               | verify, accept, draft the next tree  |

The step is one program: on a fast CPU each dispatch costs a millisecond, a fifth of a step of a small model, and bits
0.04 ms a node.
"""

from collections.abc import Generator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.constraints.host_work import Guide, RowWork, Workers
from medusa_jax.decoding.acceptance import Drafts
from medusa_jax.decoding.generate import (
    DecodeRequest,
    RowCache,
    begin,
    end_rows,
    end_wanted,
    grow,
)
from medusa_jax.decoding.masks import ALL, NO_TOKEN, words
from medusa_jax.decoding.state import DecodeState, Engine, Progress, progress_of
from medusa_jax.decoding.step import accept, append, commit, draft, verify
from medusa_jax.decoding.stopping import PAUSED, RUNNING, STUCK
from medusa_jax.devices.platforms import program
from medusa_jax.heads.optional import CopiesText
from medusa_jax.heads.registry import no_drafter
from medusa_jax.model.kernels import Kernels
from medusa_jax.sharding import Params, on_all, pin_state
from medusa_jax.tree.tree import Tree

# Guesses after each node, from which the host replaces forbidden drafts.
GUESSES = 16
# Nodes of the chain for forced tokens, if few and if many are forced. With the root, products on a CPU take them by four.
FEW, MANY = 3, 7


def with_runs(engine: Engine, heads: bool) -> Engine:
    """The engine for constraints: its tree has a chain for forced tokens, which are copied from the text if none is.

    Args:
      heads: whether the engine's drafter fills the rest of the tree; False drafts without it.
    """
    drafter, tree = engine.drafter, engine.tree.drafted
    if not tree.depth or engine.rule.by_drafts or drafter.own_step:
        return engine
    few, many = FEW, MANY
    if isinstance(drafter, CopiesText):  # its chain
        heads, few, many = False, tree.depth, max(tree.depth, MANY)
    if not heads:
        drafter, tree = no_drafter(engine.llama.config), Tree.none()
    short, tree = tree.with_copies(few), tree.with_copies(many)
    return replace(engine, drafter=drafter, tree=tree, short=short, gated=())


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


def host_inputs(engine: Engine, variables: Params, state: DecodeState) -> HostInputs:
    """Draft the first tree; does not wait for it."""
    return draft_first(engine, variables, state.replace(cache=None))


@program(static_argnums=0)
def draft_first(engine: Engine, variables: Params, state: DecodeState) -> HostInputs:
    """Draft a tree for a state without its cache."""
    return next_inputs(engine, variables, state)


def next_inputs(engine: Engine, variables: Params, state: DecodeState) -> HostInputs:
    """Draft the next tree, and copy the progress for the host."""
    # The host needs one fixed tree, so no step may choose between the chain and the spares.
    tree = engine.tree.in_every_step
    drafts = draft(engine, variables, state, tree)
    guesses_BMK = guesses_after(engine.kernels, tree, drafts)
    if not engine.rule.by_drafts:  # only such rules read the scores
        drafts = drafts._replace(ranked=())
    progress = jax.tree.map(jnp.copy, progress_of(state))
    progress, guesses_BMK = on_all(engine.llama.mesh, (progress, guesses_BMK))
    return HostInputs(progress, drafts, guesses_BMK)


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


@program(each_step=True, static_argnums=0, donate_argnums=2)
def step_nodes(
    engine: Engine,
    variables: Params,
    state: DecodeState,
    drafts: Drafts,
    allowed_BMW: jax.Array,
    status_B: jax.Array,
) -> tuple[DecodeState, HostInputs]:
    """One step, given the tokens that may follow each node; also drafts the next tree.

    Args:
      status_B: the new status of running rows; only those with RUNNING take the step.
    """
    status_B = jnp.where(state.status_B == RUNNING, status_B, state.status_B)
    state = state.replace(status_B=status_B)
    verified = verify(engine, variables, state, drafts)
    outcome = accept(engine, variables, state, verified, allowed_BMW)
    state = commit(engine, variables, state, verified, outcome)
    state = pin_state(engine.llama.mesh, append(engine, state, outcome))
    return state, next_inputs(engine, variables, state)


def step(
    engine: Engine,
    variables: Params,
    state: DecodeState,
    guides: Mapping[int, Guide],
    inputs: HostInputs,
    workers: Workers | None = None,
    size: Tree | None = None,
) -> tuple[DecodeState, HostInputs]:
    """One decode step; also drafts for the next one. Consumes the state.

    Args:
      guides: by row; any token may follow in rows without one.
      inputs: the drafts for this state, of the last step or of `host_inputs`.
      workers: do the host's work; rows that are late are PAUSED. By default this thread does it.
      size: the step's tree, by default the engine's or its short one, by what is forced.

    Raises:
      UserError: a guide reached a limit (without `workers`).
    """
    workers = workers or Workers()
    tree, (progress, drafts, guesses_BMK) = engine.tree.in_every_step, inputs
    tokens_BO, n_new_B, status_B = (
        np.asarray(x) for x in (progress.tokens_BO, progress.n_new_B, progress.status_B)
    )
    nodes_BM: Any = np.array(drafts.nodes_BM)
    B, M = nodes_BM.shape
    allowed_BMW = np.full((B, M, words(engine.llama.config.vocab_size)), ALL)
    works = {}
    for row, guide in guides.items():
        if status_B[row] == RUNNING:
            # With such rules the text depends on the drafts, so they are not replaced.
            guesses_MK = None if engine.rule.by_drafts else np.asarray(guesses_BMK)[row]
            new = tokens_BO[row, guide.consumed : n_new_B[row]].tolist()
            nodes_M, allowed_MW = nodes_BM[row].copy(), allowed_BMW[row].copy()
            works[row] = RowWork(
                guide, new, nodes_M, _children(tree), tree.copied_C, guesses_MK, allowed_MW
            )
    next_B = np.full(B, RUNNING, np.int32)
    next_B[list(works)] = PAUSED
    ready = workers.filled(works)
    for row, work in ready.items():
        next_B[row] = STUCK if work.stuck else RUNNING
        nodes_BM[row], allowed_BMW[row] = work.nodes_M, work.allowed_MW
    if not size:
        few = all(work.forced <= FEW for work in ready.values())
        size = engine.short if few and engine.short else tree
    kept_N = _places(size, tree)
    drafts = drafts._replace(tree=size, nodes_BM=nodes_BM[:, kept_N])
    return step_nodes(engine, variables, state, drafts, allowed_BMW[:, kept_N], next_B)


def stream(
    engine: Engine,
    variables: Params,
    request: DecodeRequest,
    row_cache: RowCache | None = None,
) -> Generator[Progress, np.ndarray | None]:
    """Decode like `generate.stream`, one step at a time, for requests with guides.

    The caller reads a step's text while the device runs the next step.
    """
    state, ladder = (row_cache.begin if row_cache else begin)(engine, variables, request)
    guides = {row: g for row, g in enumerate(request.guides or ()) if g is not None}
    ended_B = np.zeros(len(request.prompts), bool)
    size = 0
    inputs = host_inputs(engine, variables, state)
    while True:
        progress = inputs.progress
        running_B = (np.asarray(progress.status_B) == RUNNING) & ~ended_B
        if running_B.any():
            longest = np.asarray(progress.length_B)[running_B].max()
            while longest + engine.n_rows > ladder[size]:
                size += 1
                state = grow(engine.depth_only, ladder[size], state)
            state, inputs = step(engine, variables, state, guides, inputs)
        if row_cache:
            row_cache.state = state
        stop_B = yield progress
        state, ended_B = end_wanted(engine, state, ended_B, stop_B)
        if not (running_B & ~ended_B).any():
            return


def warm_up(engine: Engine, variables: Params, request: DecodeRequest) -> None:
    """Compile like `generate.warm_up`, for requests with guides."""
    state, ladder = begin(engine, variables, request)
    end_rows(engine.depth_only, state.status_B, np.zeros(len(request.prompts), bool))
    for slots in ladder:
        if slots > ladder[0]:
            state = grow(engine.depth_only, slots, state)
        state, _ = step_sizes(engine, variables, state)
    jax.block_until_ready(state)


def step_sizes(
    engine: Engine, variables: Params, state: DecodeState
) -> tuple[DecodeState, Progress]:
    """Take a step of each size, to compile them."""
    tree, inputs = engine.tree.in_every_step, host_inputs(engine, variables, state)
    for size in {engine.short or tree, tree}:
        state, inputs = step(engine, variables, state, {}, inputs, size=size)
    return state, inputs.progress


@lru_cache(maxsize=64)
def _places(some: Tree, tree: Tree) -> list[int]:
    """The nodes of a tree that are also in a smaller one."""
    nodes = {(): 0} | {choice: node for node, choice in enumerate(tree.choices, 1)}
    return [nodes[choice] for choice in ((), *some.choices)]


@lru_cache(maxsize=64)
def _children(tree: Tree) -> list[list[int]]:
    """The children of each node."""
    children: list[list[int]] = [[] for _ in range(tree.n_nodes)]
    for node in range(1, tree.n_nodes):
        children[int(tree.parent_M[node])].append(node)
    return children
