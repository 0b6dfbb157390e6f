"""Lookahead's decode step: `step.decode_step` with the window in the same pass (`heads/lookahead.py`).

Rows with a constraint decode with `constrained.step`: the window does not move, nothing is drafted.
"""

import jax
import jax.numpy as jnp

from medusa_jax.decoding.acceptance import Drafts, Verified
from medusa_jax.decoding.copying import Nodes
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.decoding.step import accept, append, commit, draft, run_rows
from medusa_jax.heads.drafter import Backbone
from medusa_jax.heads.lookahead import Lookahead
from medusa_jax.sharding import Params


def n_rows(engine: Engine) -> int:
    """Rows of a pass: the tree's nodes, then the window."""
    return engine.tree.n_nodes + len(drafter_of(engine).window[0])


def drafter_of(engine: Engine) -> Lookahead:
    """The engine's drafter."""
    assert isinstance(engine.drafter, Lookahead)
    return engine.drafter


def decode_step(engine: Engine, variables: Params, state: DecodeState) -> DecodeState:
    """As `step.decode_step`; the window moves before the accepted path is committed."""
    drafts = draft(engine, variables, state, engine.tree)
    verified, window_BWV = verify(engine, variables, state, drafts)
    outcome = accept(engine, variables, state, verified)
    moved = drafter_of(engine).learn(state.drafter, state.root_B, window_BWV)
    state = commit(engine, variables, state.replace(drafter=moved), verified, outcome)
    return append(engine, state, outcome)


def verify(
    engine: Engine, variables: Params, state: DecodeState, drafts: Drafts
) -> tuple[Verified, jax.Array]:
    """Verify the tree; also returns the logits of the window's last level [B, W, V]."""
    backbone, M = Backbone(engine.llama, variables["backbone"]), drafts.tree.n_nodes
    window_BX, W = state.drafter.window_BX, drafter_of(engine).heads.window
    tokens_BR = jnp.concatenate([drafts.nodes_BM, window_BX], axis=1)
    hidden_BRE, cache = run_rows(
        backbone, state, tokens_BR, *rows_of_pass(drafter_of(engine), drafts.tree)
    )
    hidden_BME = hidden_BRE[:, :M]
    with jax.named_scope("lm_head"):  # one pass for both
        scored_BRE = jnp.concatenate([hidden_BME, hidden_BRE[:, -W:]], axis=1)
        logits_BRV = backbone.lm_head(scored_BRE)
    rest = logits_BRV[:, :M], cache, state.sampling, state.length_B
    return Verified(drafts, hidden_BME, *rest), logits_BRV[:, M:]


def rows_of_pass(drafter: Lookahead, tree: Nodes) -> tuple[jax.Array, jax.Array]:
    """Depths and mask of all rows of a pass: tree nodes, then the window.

    Example: a chain of two nodes and two window rows; the second row sees the first:

        root   1 . . .
        node   1 1 . .
        row    1 . 1 .
        row    1 . 1 1
    """
    depth_M, mask_MM = jnp.asarray(tree.depth_M), jnp.asarray(tree.mask_MM)
    (depth_X, mask_XX), M = drafter.window, tree.n_nodes
    depth_R = jnp.concatenate([depth_M, jnp.asarray(depth_X)])
    mask_RR = jnp.pad(mask_MM, (0, len(depth_X)))
    mask_RR = mask_RR.at[M:, M:].set(jnp.asarray(mask_XX))
    return depth_R, mask_RR.at[M:, 0].set(True)
