"""Lookahead decoding (Fu et al. 2024): no draft model; the backbone collects n-grams while it decodes.

Along with the tree, every pass runs a *window* of guessed tokens, N - 1 levels by W columns. The levels
are successive Jacobi iterations, each one position later than the level above:

    depth after the root    1    2    3    4    5      (W = 4, N = 4)
    level 0                 a0   a1   a2
    level 1                 b0   b1   b2   b3
    level 2                      c0   c1   c2   c3

c1 reads the root, a0, b1 and itself: level 0 up to its column, then its column down. The
backbone's predictions after the last level, d0 ... d3, complete one n-gram per column, such
as root b0 c0 d0 and a0 b1 c1 d1; then the window moves on, to b, c and d. The *pool*
stores, for every token, the last G different continuations of N - 1 tokens. The root's
continuations are drafted, each as a branch of the tree.

Loaded as `--drafter examples.lookahead:Lookahead`, with fields if wanted
(`examples.lookahead:Lookahead:window=7:ngram=4`). It has its own decode step: `decoding.step.decode_step` with
the window in the same pass. Rows with a constraint decode with the package's step: the window does not move,
nothing is drafted.

As in the released code, the window moves by one position per step, its new tokens are the
most likely ones even when decoding samples, and the pool does not use the prompt. Unlike
the release, all levels start with arbitrary tokens, so the window's shape never changes.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig
from medusa_jax.decoding.acceptance import Drafts, Verified
from medusa_jax.decoding.copies import Nodes
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.decoding.step import accept, append, commit, draft
from medusa_jax.errors import UserError, between
from medusa_jax.heads.drafter import Committed, DraftRequest, Params, Proposal
from medusa_jax.heads.untrained import Untrained, propose_given
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.product import at_least_f32
from medusa_jax.tree.tree import MOST_DEEP, Tree

# Marks an empty entry of the pool.
NOTHING = -1


@dataclass(unsafe_hash=True)
class LookaheadConfig(HeadsConfig):
    """Sizes as released for 7B. The depth limit of trees, `n_heads`, follows from `ngram`."""

    drafter: str = "examples.lookahead:Lookahead"
    lm_head: str = "shared"
    window: int = 15
    ngram: int = 5
    guesses: int = 15


class LookaheadState(struct.PyTreeNode):
    """Window and pool; a guess has Y = N - 1 tokens.

    Attributes:
      window_BX: the tokens of the window by level: W - 1 of level 0, then W per level.
      pool_BVGY: for every token the last G different continuations, the newest first, or NOTHING.
    """

    window_BX: jax.Array
    pool_BVGY: jax.Array


@dataclasses.dataclass(frozen=True)
class Lookahead(Untrained):
    """No parameters. The nodes at depth 1 start one guess each; deeper nodes continue it."""

    heads: LookaheadConfig

    Config = LookaheadConfig

    def check(self) -> None:
        h = self.heads
        for field, minimum in (("window", 2), ("ngram", 3), ("guesses", 1)):
            between(f"{self.name}: {field}", getattr(h, field), minimum, MOST_DEEP)

    @property
    def n_heads(self) -> int:
        return self.heads.ngram - 1

    @property
    def default_tree(self) -> Tree:
        """One branch per guess."""
        depths = range(1, self.heads.ngram)
        return Tree.from_choices(
            [(g, *(0,) * (d - 1)) for g in range(self.heads.guesses) for d in depths]
        )

    def check_tree(self, tree: Tree) -> None:
        super().check_tree(tree)
        if any(any(c[1:]) or c[0] >= self.heads.guesses for c in tree.drafted.choices):
            raise UserError(
                f"{self.name} drafts at most {self.heads.guesses} chains side by side: its trees "
                "branch at the root alone"
            )

    @cached_property
    def window(self) -> tuple[np.ndarray, np.ndarray]:
        """The window's rows by level: their depths [X] and mask [X, X], in which a row sees itself.

        All see the text and the root as well; no tree node sees them, and they are never emitted.
        """
        W, N = self.heads.window, self.heads.ngram
        level = np.repeat(np.arange(N - 1), [W - 1] + [W] * (N - 2))
        column = np.concatenate([np.arange(W - 1), *[np.arange(W)] * (N - 2)])
        # Level 0 is one position ahead of level 1 in the same column: the root takes its first place.
        depth = column + np.maximum(level, 1)
        in_window = (level[None, :] == 0) & (depth[None, :] <= (depth - level)[:, None])
        is_branch = (level[None, :] > 0) & (level[None, :] <= level[:, None])
        same_column = is_branch & (column[None, :] == column[:, None])
        return depth.astype(np.int32), in_window | same_column

    @property
    def extra_rows(self) -> int:
        """The window's rows."""
        return len(self.window[0])

    @property
    def own_step(self) -> Callable[[Engine, Params, DecodeState], DecodeState]:
        return self.decode_step

    def decode_step(
        self, engine: Engine, variables: Params, state: DecodeState
    ) -> DecodeState:
        """Like `step.decode_step`; the window moves before the accepted path is committed."""
        drafts = draft(engine, variables, state, engine.tree)
        verified, window_BWV = self.verify(engine, variables, state, drafts)
        outcome = accept(engine, variables, state, verified)
        moved = self.learn(state.drafter, state.root_B, window_BWV)
        state = state.replace(drafter=moved)
        state = commit(engine, variables, state, verified, outcome)
        return append(engine, state, outcome)

    def verify(
        self, engine: Engine, variables: Params, state: DecodeState, drafts: Drafts
    ) -> tuple[Verified, jax.Array]:
        """Verify the tree; also returns the logits of the window's last level [B, W, V]."""
        backbone, M = engine.backbone(variables), drafts.tree.n_nodes
        tokens_BR = jnp.concatenate([drafts.nodes_BM, state.drafter.window_BX], axis=1)
        rows = tokens_BR, *self.rows_of_pass(drafts.tree)
        with jax.named_scope("backbone"):
            hidden_BRE, cache = backbone.read_tree(*rows, state.cache, state.length_B)
        hidden_BME, last_BWE = hidden_BRE[:, :M], hidden_BRE[:, -self.heads.window :]
        with jax.named_scope("lm_head"):  # one pass for both
            logits_BRV = backbone.lm_head(jnp.concatenate([hidden_BME, last_BWE], axis=1))
        verified = Verified(
            drafts, hidden_BME, logits_BRV[:, :M], cache, state.sampling, state.length_B
        )
        return verified, logits_BRV[:, M:]

    def rows_of_pass(self, tree: Nodes) -> tuple[jax.Array, jax.Array]:
        """Depths and mask of all rows of a pass: tree nodes, then the window.

        Example: a chain of two nodes and two window rows; the second row sees the first:

            root   1 . . .
            node   1 1 . .
            row    1 . 1 .
            row    1 . 1 1
        """
        depth_M, mask_MM = jnp.asarray(tree.depth_M), jnp.asarray(tree.mask_MM)
        (depth_X, mask_XX), M = self.window, tree.n_nodes
        depth_R = jnp.concatenate([depth_M, jnp.asarray(depth_X)])
        mask_RR = jnp.pad(mask_MM, (0, len(depth_X)))
        mask_RR = mask_RR.at[M:, M:].set(jnp.asarray(mask_XX))
        return depth_R, mask_RR.at[M:, 0].set(True)

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> LookaheadState:
        h, V = self.heads, self.llama.vocab_size
        window = np.random.default_rng(0).integers(0, V, len(self.window[0]), np.int32)
        sizes = (batch, V, h.guesses, h.ngram - 1)
        return LookaheadState(
            jnp.tile(window[None, :], (batch, 1)), jnp.full(sizes, NOTHING, jnp.int32)
        )

    def commit(
        self, params: Params, backbone: Backbone, state: LookaheadState, new: Committed
    ) -> LookaheadState:
        return state

    def learn(
        self, state: LookaheadState, root_B: jax.Array, logits_BWV: jax.Array
    ) -> LookaheadState:
        """Add the n-grams of this step to the pool and move the window.

        Args:
          logits_BWV: the backbone's logits of the window's last level.
        """
        W = self.heads.window
        next_BW = jnp.argmax(logits_BWV, axis=-1).astype(jnp.int32)
        first_BW, *below = jnp.split(
            state.window_BX, np.cumsum([W - 1] + [W] * (self.heads.ngram - 3)), axis=1
        )
        levels = [*below, next_BW]
        keys_BW = jnp.concatenate([root_B[:, None].astype(jnp.int32), first_BW], axis=1)
        pool = remembered(state.pool_BVGY, keys_BW, jnp.stack(levels, axis=-1))
        moved_BX = jnp.concatenate([levels[0][:, 1:], *levels[1:]], axis=1)
        return LookaheadState(moved_BX, pool)

    def propose(
        self,
        params: Params,
        backbone: Backbone,
        state: LookaheadState,
        request: DraftRequest,
    ) -> Proposal:
        """Node [g, 0, ..., 0] of depth d is the d-th token of guess g, or the root if there is none."""
        root_B, tree, _ = request
        guesses_BGY = state.pool_BVGY[jnp.arange(root_B.shape[0]), root_B]
        branch_M = np.array([0] + [c[0] for c in tree.choices])
        drafts_BM = guesses_BGY[:, branch_M, np.maximum(tree.depth_M - 1, 0)]
        drafted_BM = (drafts_BM != NOTHING) & (tree.depth_M > 0)[None, :]
        nodes_BM = jnp.where(drafted_BM, drafts_BM, root_B[:, None])
        dtype = at_least_f32(backbone.llama.dtype)
        return propose_given(request, nodes_BM, drafted_BM, self.llama.vocab_size, dtype)


def remembered(pool_BVGY: jax.Array, keys_BW: jax.Array, grams_BWY: jax.Array) -> jax.Array:
    """Add one continuation to the pool for each of W keys, one after the other.

    A new one goes to the front and pushes out the last; a known one moves to the front. Example for
    one key: [x y z] and w give [w x y], [x y z] and y give [y x z].
    """
    row_B, G = jnp.arange(pool_BVGY.shape[0]), pool_BVGY.shape[2]

    def one(i: jax.Array, pool_BVGY: jax.Array) -> jax.Array:
        key_B, gram_BY = keys_BW[:, i], grams_BWY[:, i]
        slots_BGY = pool_BVGY[row_B, key_B]
        same_BG = jnp.all(slots_BGY == gram_BY[:, None], axis=-1)
        place_B = jnp.where(jnp.any(same_BG, axis=-1), jnp.argmax(same_BG, axis=-1), G - 1)
        shifted_BGY = jnp.concatenate([gram_BY[:, None], slots_BGY[:, :-1]], axis=1)
        moves_BG1 = (jnp.arange(G)[None, :] <= place_B[:, None])[..., None]
        return pool_BVGY.at[row_B, key_B].set(jnp.where(moves_BG1, shifted_BGY, slots_BGY))

    return lax.fori_loop(0, keys_BW.shape[1], one, pool_BVGY)
