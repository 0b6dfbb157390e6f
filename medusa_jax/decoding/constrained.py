"""Decoding where the host says which tokens may follow: the steps of rows with a constraint.

A constraint is part of the verifier: the target token after a node is chosen among those that the
constraint leaves after the node's path, so drafted text is that of plain decoding with the same
constraint. The host knows the constraints (`Guide`) and computes the bits of all nodes while the
backbone's pass over them runs; they are needed when its logits are judged:

    host    root's bits | dispatch    | bits of every node        | dispatch | wait
    device              | draft       | verify                    | judge    |

Drafts of depth 1 are ranked among the tokens that may follow the root, and where the grammar leaves
one text only, a chain of the tree holds it.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.decoding.acceptance import Verified
from medusa_jax.decoding.masks import ALL, NO_TOKEN, words
from medusa_jax.decoding.state import DecodeState, Engine, Progress, copied_progress
from medusa_jax.decoding.step import Drafts, draft, settle, verify
from medusa_jax.decoding.stopping import RUNNING, STUCK
from medusa_jax.devices.platforms import program
from medusa_jax.heads.drafter import Backbone
from medusa_jax.heads.vocabulary import for_drafting
from medusa_jax.sharding import on_all, pin_state
from medusa_jax.tree import Tree


class Guide(Protocol):
    """The host's side of one row's constraint.

    Attributes:
      consumed: number of emitted tokens that it has read.
      first_W: bits of the tokens that may come first.
    """

    consumed: int
    first_W: np.ndarray

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens of the text."""

    def fill(self, into_W: np.ndarray) -> bool:
        """Write the bits of the tokens that may follow; False if there are none."""

    def forced(self, most: int) -> list[int]:
        """Tokens that are likely to follow since no other text may; a limited number."""

    def fill_tree(
        self, nodes_M: np.ndarray, children: Sequence[Sequence[int]], into_MW: np.ndarray
    ) -> None:
        """Write the bits after each node of a tree; those after the root are there."""


@program(static_argnums=0)
def draft_nodes(
    engine: Engine,
    variables: dict[str, Any],
    state: DecodeState,
    root_BW: jax.Array,
    forced_BL: jax.Array,
) -> tuple[Drafts, jax.Array]:
    """Draft a tree among the tokens that may follow the root.

    Args:
      forced_BL: tokens for the chain down to the deepest node, NO_TOKEN where none is forced.

    Returns: the drafts, and their tokens for the host.
    """
    tree, backbone = engine.tree, Backbone(engine.llama, variables["backbone"])
    drafts = draft(engine, variables["heads"], backbone, state, tree, root_BW)
    nodes_BM = drafts.nodes_BM
    if not engine.rule.by_drafts:
        chain_L = tree.ancestors_ML[int(np.argmax(tree.depth_M))]
        own_BL = nodes_BM[:, chain_L]
        nodes_BM = nodes_BM.at[:, chain_L].set(
            jnp.where(forced_BL == NO_TOKEN, own_BL, forced_BL)
        )
        drafts = drafts._replace(logits={})  # only rules by drafts read them
    drafts = drafts._replace(nodes_BM=nodes_BM, ids_O=None)
    return drafts, on_all(engine.llama.mesh, jnp.copy(nodes_BM))


@program(static_argnums=0, donate_argnums=2)
def verify_nodes(
    engine: Engine, variables: dict[str, Any], cache: Any, rest: DecodeState, drafts: Drafts
) -> tuple[Verified, Any]:
    """The backbone's pass, and the cache after it. Donates the cache, which the state lacks."""
    backbone = Backbone(engine.llama, variables["backbone"])
    state = rest.replace(cache=cache)
    verified = verify(engine, backbone, state, engine.tree, drafts)
    apart: Any = {"tree": None, "sampling": None, "nodes_BM": None, "cache": None}
    return verified._replace(**apart), verified.cache


@program(static_argnums=0, donate_argnums=(2, 3))
def judge(
    engine: Engine,
    variables: dict[str, Any],
    rest: DecodeState,
    cache: Any,
    verified: Verified,
    nodes_BM: jax.Array,
    allowed_BMW: jax.Array,
    stuck_B: jax.Array,
) -> DecodeState:
    """Accept, commit and append among the tokens that may follow each node."""
    ids_O = for_drafting(
        Backbone(engine.llama, variables["backbone"]), variables["heads"]
    ).ids_O
    status_B = jnp.where(stuck_B & (rest.status_B == RUNNING), STUCK, rest.status_B)
    state = rest.replace(cache=cache, status_B=status_B)
    verified = verified._replace(
        tree=engine.tree,
        sampling=rest.sampling,
        nodes_BM=nodes_BM,
        cache=cache,
        draft_ids_O=ids_O,
    )
    state = settle(engine, variables, state, verified, allowed_BMW)
    return pin_state(engine.llama.mesh, state)


def step(
    engine: Engine,
    variables: dict[str, Any],
    state: DecodeState,
    guides: Mapping[int, Guide],
    progress: Progress | None = None,
) -> tuple[DecodeState, Progress]:
    """One decode step. Consumes the state.

    Args:
      guides: by row; rows without one may go on with any token.
      progress: of this state, if it is there already.
    """
    tree = engine.tree
    progress = copied_progress(engine.depth_only, state) if progress is None else progress
    tokens_BO, n_new_B, status_B = (
        np.asarray(x) for x in (progress.tokens_BO, progress.n_new_B, progress.status_B)
    )
    B, M = len(n_new_B), tree.n_nodes
    allowed_BMW = np.full((B, M, words(engine.llama.config.vocab_size)), ALL)
    forced_BL = np.full((B, tree.path_length), NO_TOKEN, np.int32)
    stuck_B = np.zeros(B, bool)
    running = {row: g for row, g in guides.items() if status_B[row] == RUNNING}
    for row, guide in running.items():
        guide.advance(tokens_BO[row, guide.consumed : n_new_B[row]].tolist())
        stuck_B[row] = not guide.fill(allowed_BMW[row, 0])
        if tree.depth and not stuck_B[row]:
            forced = guide.forced(tree.depth)
            forced_BL[row, 1 : 1 + len(forced)] = forced
    cache, rest = state.cache, state.replace(cache=None)
    root_BW = np.ascontiguousarray(allowed_BMW[:, 0])
    drafts, shown = draft_nodes(engine, variables, rest, root_BW, forced_BL)
    verified, cache = verify_nodes(engine, variables, cache, rest, drafts)
    nodes_BM = np.array(shown)  # there before the backbone's pass ends
    children = _children(tree)
    for row, guide in running.items():
        if not stuck_B[row]:
            guide.fill_tree(nodes_BM[row], children, allowed_BMW[row])
    judged = (verified, nodes_BM, allowed_BMW, stuck_B)
    state = judge(engine, variables, rest, cache, *judged)
    return state, copied_progress(engine.depth_only, state)


@lru_cache(maxsize=64)
def _children(tree: Tree) -> list[list[int]]:
    """The children of each node."""
    children: list[list[int]] = [[] for _ in range(tree.n_nodes)]
    for node in range(1, tree.n_nodes):
        children[int(tree.parent_M[node])].append(node)
    return children
