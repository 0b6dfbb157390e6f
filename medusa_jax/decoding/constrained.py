"""Decode steps of rows with a constraint: the host computes which tokens may follow.

A constraint is part of the verifier: the target token after a node is chosen among the
tokens that the constraint allows after the node's path, so drafted text equals plain
decoding's with the same constraint. Before a step the host, which has the constraints (`Guide`), fills a chain of the
tree with the tokens that are forced, replaces forbidden drafts, and computes the allowed tokens after all nodes, as bits:

    host    forced tokens, bits of every node | dispatch | text of the last step | wait
    device                                               | verify, accept, draft the next tree  |

On a fast CPU each dispatch costs a millisecond, a fifth of a step of a small model. So where the device can call the
host, `stream` runs a loop of steps there (`constrained_step.py`). A server dispatches every step: its rows do not wait
for each other.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from medusa_jax.constraints.guide import Guide
from medusa_jax.constraints.host_work import FillWorks, RowWork, fill_all
from medusa_jax.decoding import generation
from medusa_jax.decoding.acceptance import Drafts
from medusa_jax.decoding.constrained_step import HostInputs, constrained_step, next_inputs
from medusa_jax.decoding.generation import Keep, begin, end_wanted, grow
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.state import DecodeState, Engine, Progress
from medusa_jax.decoding.stopping import PAUSED, RUNNING, STUCK
from medusa_jax.decoding.token_sets import ALL, words
from medusa_jax.heads.registry import no_drafter
from medusa_jax.host_calls import HostFunction
from medusa_jax.programs import program
from medusa_jax.sharding import Params
from medusa_jax.tree.tree import Tree

# Nodes of the chain for forced tokens, if few and if many are forced. With the root, products on a CPU take them by four.
FEW, MANY = 3, 7


def with_runs(engine: Engine, heads: bool) -> Engine:
    """The engine for constrained rows: its tree has a chain for forced tokens; if none is forced, it is copied from the text.

    Args:
      heads: whether the engine's drafter fills the rest of the tree; False drafts without it.
    """
    drafter, tree = engine.drafter, engine.tree.drafted
    if not tree.depth or engine.rule.by_drafts:
        return engine
    if not heads:
        drafter, tree = no_drafter(engine.llama.config), Tree.none()
    sizes = tree.with_copies(FEW), tree.with_copies(MANY)
    # Where one launch runs many steps, a step's time grows with its nodes: take the short chain.
    short, tree = (None, sizes[0]) if calls_host(engine) else sizes
    return replace(engine, drafter=drafter, tree=tree, short=short, gated=())


first_inputs = program(static_argnums=0)(next_inputs)


def host_inputs(engine: Engine, variables: Params, state: DecodeState) -> HostInputs:
    """Draft the first tree; does not wait for it."""
    return first_inputs(engine, variables, state.replace(cache=None))


@program(each_step=True, static_argnums=0, donate_argnums=2)
def step_nodes(
    engine: Engine, variables: Params, state: DecodeState, drafts: Drafts, status_B: Any
) -> tuple[DecodeState, HostInputs]:
    """A `constrained_step`; also drafts the next tree."""
    state = constrained_step(engine, variables, state, drafts, status_B)
    return state, next_inputs(engine, variables, state)


class HostArrays(NamedTuple):
    """Arrays of `Progress` and `HostInputs` from which `host_part` works."""

    tokens_BO: np.ndarray
    n_new_B: np.ndarray
    status_B: np.ndarray
    nodes_BM: np.ndarray
    guesses_BMK: np.ndarray


def host_part(
    engine: Engine, guides: Mapping[int, Guide], read: HostArrays, fill: FillWorks
) -> tuple[bool, np.ndarray, np.ndarray, np.ndarray]:
    """Draft what is forced, and compute what may follow.

    Args:
      guides: by row; any token may follow in rows without one.
      fill: does the work; rows that are late are PAUSED.

    Returns: whether few tokens are forced in every row, the new status of running rows, the tree and the bits of the
      tokens that may follow its nodes.

    Raises:
      UserError: a guide reached a limit (without threads).
    """
    tree, nodes_BM = engine.tree.fixed, read.nodes_BM.copy()
    B, M = nodes_BM.shape
    allowed_BMW = np.full((B, M, words(engine.llama.config.vocab_size)), ALL)
    works = {}
    for row, guide in guides.items():
        if read.status_B[row] == RUNNING:
            # With such rules the text depends on the drafts, so they are not replaced.
            guesses_MK = None if engine.rule.by_drafts else read.guesses_BMK[row]
            new = read.tokens_BO[row, guide.consumed : read.n_new_B[row]].tolist()
            nodes_M, allowed_MW = nodes_BM[row].copy(), allowed_BMW[row].copy()
            works[row] = RowWork(
                guide, new, nodes_M, tree.children, tree.copied_C, guesses_MK, allowed_MW
            )
    next_B = np.full(B, RUNNING, np.int32)
    next_B[list(works)] = PAUSED
    ready = fill(works)
    for row, work in ready.items():
        next_B[row] = STUCK if work.stuck else RUNNING
        nodes_BM[row], allowed_BMW[row] = work.nodes_M, work.allowed_MW
    few = all(work.forced <= FEW for work in ready.values())
    return few, next_B, nodes_BM, allowed_BMW


def step(
    engine: Engine,
    variables: Params,
    state: DecodeState,
    guides: Mapping[int, Guide],
    inputs: HostInputs,
    fill: FillWorks = fill_all,
    size: Tree | None = None,
) -> tuple[DecodeState, HostInputs]:
    """One decode step; also drafts for the next one. Consumes the state.

    Args:
      guides, fill: as for `host_part`; by default this thread does the work.
      inputs: the drafts for this state, of the last step or of `host_inputs`.
      size: the step's tree; by default the engine's short one if it has one and few tokens are forced, else its tree.
    """
    progress, drafts, guesses_BMK = inputs
    texts = progress.tokens_BO, progress.n_new_B, progress.status_B
    read = HostArrays(*map(np.asarray, (*texts, drafts.nodes_BM, guesses_BMK)))
    few, status_B, nodes_BM, allowed_BMW = host_part(engine, guides, read, fill)
    tree = engine.tree.fixed
    size = size or (few and engine.short) or tree
    kept_N = [tree.node_of[path] for path in ((), *size.choices)]
    arrays: Any = {"nodes_BM": nodes_BM[:, kept_N], "allowed_BMW": allowed_BMW[:, kept_N]}
    drafts = drafts._replace(tree=size, **arrays)
    return step_nodes(engine, variables, state, drafts, status_B)


def stream(
    engine: Engine,
    variables: Params,
    request: DecodeRequest,
    state: DecodeState,
    cache_sizes: list[int],
    keep: Keep | None = None,
) -> Generator[Progress, np.ndarray | None]:
    """Decode like `generation.stream`, for requests with guides.

    Raises:
      UserError: a guide reached a limit.
    """
    guides = {row: g for row, g in enumerate(request.guides or ()) if g is not None}
    if not calls_host(engine):
        yield from stream_steps(engine, variables, state, cache_sizes, guides, keep)
        return
    with HostFunction(partial(answer, engine, guides)) as host:
        request = replace(request, host=host)
        begun = generation.with_request(engine, state, request), cache_sizes
        yield from generation.stream(engine, variables, request, *begun, keep)


def calls_host(engine: Engine) -> bool:
    """Whether the loop on the device calls the host."""
    mesh = engine.llama.mesh
    return engine.kernels.calls_host and (mesh is None or mesh.size == 1)


def answer(engine: Engine, guides: Mapping[int, Guide], *arrays: np.ndarray) -> None:
    """Answer a call of `host_step`: arguments and results of `host_part`, flat."""
    read, results = HostArrays(*arrays[:5]), arrays[5:]
    B, M = len(read.n_new_B), engine.tree.n_nodes
    read = read._replace(
        tokens_BO=read.tokens_BO.reshape(B, -1),
        nodes_BM=read.nodes_BM.reshape(B, M),
        guesses_BMK=read.guesses_BMK.reshape(B, M, -1),
    )
    _, *part = host_part(engine, guides, read, fill_all)
    for result, value in zip(results[1:], part):
        result[:] = value.reshape(-1).view(np.int32)
    results[0][0] = 1  # now the others are written


def stream_steps(
    engine: Engine,
    variables: Params,
    state: DecodeState,
    cache_sizes: list[int],
    guides: Mapping[int, Guide],
    keep: Keep | None = None,
) -> Generator[Progress, np.ndarray | None]:
    """Decode one step at a time. The caller reads a step's text while the device runs the next step."""
    ended_B = np.zeros(len(state.root_B), bool)
    size = 0
    inputs = host_inputs(engine, variables, state)
    while True:
        progress = inputs.progress
        running_B = (np.asarray(progress.status_B) == RUNNING) & ~ended_B
        if running_B.any():
            longest = np.asarray(progress.length_B)[running_B].max()
            while longest + engine.free_slots > cache_sizes[size]:
                size += 1
                state = grow(engine.depth_only, cache_sizes[size], state)
            state, inputs = step(engine, variables, state, guides, inputs)
        if keep:
            keep(state)
        stop_B = yield progress
        state, ended_B = end_wanted(engine, state, ended_B, stop_B)
        if not (running_B & ~ended_B).any():
            return


def warm_up(
    engine: Engine, variables: Params, request: DecodeRequest
) -> Callable[[], None]:
    """Compile like `generation.warm_up`, for requests with guides."""
    if calls_host(engine):
        request = replace(request, host=HostFunction(answer))
        return generation.warm_up(engine, variables, request)
    steps = partial(step_sizes, engine, variables)
    return partial(generation.run_sizes, engine, steps, *begin(engine, variables, request))


def step_sizes(
    engine: Engine, variables: Params, state: DecodeState
) -> tuple[DecodeState, Progress]:
    """Take a step of each size, to compile them."""
    tree, inputs = engine.tree.fixed, host_inputs(engine, variables, state)
    for size in {engine.short or tree, tree}:
        state, inputs = step(engine, variables, state, {}, inputs, size=size)
    return state, inputs.progress
