"""Prompt lookup (Saxena 2023; `prompt_lookup_num_tokens` of transformers): draft the tokens that followed
an earlier occurrence of the last few tokens.

The text ends with the root; a *match* is an earlier place that ends with the same n tokens, n as large
as possible and at most `ngram`. Longer matches come first, and matches of equal length from left to
right, as in transformers: an earlier one has more text after it. Example, ngram = 2:

    text     a b c d a b e b c a b          (the root is the last b)
    matches  "a b" at 0: c d a b ..., "a b" at 4: e b c ..., "b" at 7: c a b ...

The first `matches` of them fill the static tree: the r-th child of a node is the r-th distinct next
token among the matches that agree with the path to the node. A chain uses only the first match, as
transformers does. A match that reaches the end of the text continues from its start, as the text would
if it kept repeating. Without a match, all nodes get the root token.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Backbone, Committed, DraftRequest, Params, Proposal
from medusa_jax.heads.fill import Level, propose_given
from medusa_jax.heads.matches import continuations
from medusa_jax.heads.state import PositionState
from medusa_jax.heads.untrained import Untrained
from medusa_jax.model.product import at_least_f32
from medusa_jax.tree.tree import Tree


@dataclass(unsafe_hash=True)
class PromptLookupConfig(HeadsConfig):
    """Fields of prompt lookup; 10 tokens is the default of transformers."""

    drafter: str = "prompt_lookup"
    lm_head: str = "shared"
    # Most tokens drafted from a match.
    tokens: int = 10
    # Longest n-gram to look up, and most matches to fill the tree.
    ngram: int = 3
    matches: int = 8


class TextState(PositionState):
    """Tokens by position.

    Attributes:
      text_BS: the first `length` tokens of a row are valid; the root is not among them.
      length_B: accepted positions.
    """

    text_BS: jax.Array

    @classmethod
    def zeros(cls, batch: int, slots: int) -> "TextState":
        """The state before any text."""
        return cls(jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, slots), jnp.int32))

    def extended(self, new: Committed) -> "TextState":
        """The text with n more tokens.

        All T candidates are written; those after the n-th are invalid, and the next call overwrites
        them.
        """
        write = jax.vmap(
            lambda row, tokens, at: lax.dynamic_update_slice(row, tokens, (at,))
        )
        tokens_BT = new.tokens_BT.astype(jnp.int32)
        text_BS = write(self.text_BS, tokens_BT, self.length_B)
        return TextState(self.length_B + new.n_B, text_BS)

    def grow(self, slots: int) -> "TextState":
        """The same text with room for `slots` tokens."""
        more = slots - self.text_BS.shape[1]
        return self.replace(text_BS=jnp.pad(self.text_BS, ((0, 0), (0, more))))


@dataclasses.dataclass(frozen=True)
class PromptLookup(Untrained):
    """No parameters; the state is the text."""

    heads: PromptLookupConfig

    name = "prompt_lookup"
    Config = PromptLookupConfig
    copies = True

    def check(self) -> None:
        for field in ("tokens", "ngram", "matches"):
            if getattr(self.heads, field) < 1:
                raise UserError(
                    f"{self.name}: {field} is at least 1, not {getattr(self.heads, field)}"
                )

    @property
    def n_heads(self) -> int:
        return self.heads.tokens

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> TextState:
        return TextState.zeros(batch, slots)

    def commit(
        self, params: Params, backbone: Backbone, state: TextState, new: Committed
    ) -> TextState:
        return state.extended(new)

    def propose(
        self, params: Params, backbone: Backbone, state: TextState, request: DraftRequest
    ) -> Proposal:
        root_B, tree, _ = request
        index_1S = jnp.arange(state.text_BS.shape[1])[None, :]
        is_root_BS = index_1S == state.length_B[:, None]
        text_BS = jnp.where(is_root_BS, root_B[:, None], state.text_BS)
        found = continuations(
            text_BS, state.length_B, self.heads.ngram, self.heads.matches, tree.depth
        )
        chains_BCL, length_BC = found
        nodes_BM, given_BM = merged(tree, chains_BCL, length_BC > 0, root_B)
        dtype = at_least_f32(backbone.llama.dtype)
        return propose_given(request, nodes_BM, given_BM, self.llama.vocab_size, dtype)


def merged(
    tree: Tree, chains_BCL: jax.Array, there_BC: jax.Array, root_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merge chains into a static tree; equal prefixes share nodes.

    The r-th child of a node is the r-th distinct next token among the chains that agree with the path
    so far, in their order, or the root token if there is none.

    Example: chains a b, a c, d e. Children of the root: a, d; of a: b, c.

    Args:
      chains_BCL: in order of preference; L is at least the tree's depth.
      there_BC: which chains exist.

    Returns: tokens of all nodes, and which of them come from a chain [B, M].
    """
    C = chains_BCL.shape[1]
    before_CC = jnp.tri(C, k=-1, dtype=bool)  # [c, e]: chain e comes before chain c
    nodes, given = [root_B[:, None]], [jnp.ones_like(root_B[:, None], bool)]
    agrees_BNC = there_BC[:, None, :]
    for depth, level in enumerate(Level.of(tree)):
        next_BC = chains_BCL[:, :, depth]
        same_BCC = next_BC[:, :, None] == next_BC[:, None, :]
        agrees_BPC = agrees_BNC[:, level.nodes_P]
        earlier_BPCC = agrees_BPC[:, :, None, :] & (same_BCC & before_CC[None])[:, None]
        first_BPC = agrees_BPC & ~jnp.any(earlier_BPCC, axis=-1)
        rank_BPC = jnp.cumsum(first_BPC, axis=-1) - 1
        wanted_1N1 = jnp.asarray(level.rank_C)[None, :, None]
        picked_BNC = first_BPC[:, level.parent_C] & (
            rank_BPC[:, level.parent_C] == wanted_1N1
        )
        there_BN = jnp.any(picked_BNC, axis=-1)
        token_BN = jnp.sum(jnp.where(picked_BNC, next_BC[:, None, :], 0), axis=-1)
        token_BN = jnp.where(there_BN, token_BN, root_B[:, None])
        agrees_BNC = (
            agrees_BPC[:, level.parent_C]
            & (next_BC[:, None, :] == token_BN[..., None])
            & there_BN[..., None]
        )
        nodes.append(token_BN)
        given.append(there_BN)
    return jnp.concatenate(nodes, axis=1), jnp.concatenate(given, axis=1)
