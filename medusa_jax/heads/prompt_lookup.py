"""Prompt lookup (Saxena 2023; `prompt_lookup_num_tokens` of transformers): draft the tokens that followed
an earlier occurrence of the last few tokens.

The text ends with the root. A *match* is an earlier place where the same n tokens end, with
n as large as possible and at most `ngram`. Of several matches the first is used, as in
transformers, since most text follows it. Example, ngram = 2:

    text     a b c d a b e b c a b          (the root is the last b)
    match    "a b" at 0: c d a b ...

The tokens after the match fill the chain of the tree's best ranks. If they reach the end of
the text, they repeat from their start, as the text would if it kept repeating. Nodes
without a draft get the root token.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig
from medusa_jax.errors import between
from medusa_jax.heads.drafter import Committed, DraftRequest, Params, Proposal
from medusa_jax.heads.matches import continuations
from medusa_jax.heads.state import PositionState
from medusa_jax.heads.untrained import Untrained, propose_given
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.product import at_least_f32
from medusa_jax.tree.tree import MOST_DEEP

# With SmolLM2, the first draft is right in 15% of the steps after a match of one token, in 48% and 80% after two and
# three (research/log/2026-11_speed.md).
LEAST_MATCH = 2


@dataclass(unsafe_hash=True)
class PromptLookupConfig(HeadsConfig):
    """Fields of prompt lookup; 10 tokens is the default of transformers."""

    drafter: str = "prompt_lookup"
    lm_head: str = "shared"
    # Most tokens drafted from a match.
    tokens: int = 10
    # Longest n-gram to look up.
    ngram: int = 3


class TextState(PositionState):
    """Tokens by position.

    Attributes:
      text_BS: the first `length` tokens of a row are valid; the root is not among them.
      length_B: accepted positions.
    """

    text_BS: jax.Array

    def grow(self, slots: int) -> "TextState":
        """The same text with room for `slots` tokens."""
        new_slots = slots - self.text_BS.shape[1]
        return self.replace(text_BS=jnp.pad(self.text_BS, ((0, 0), (0, new_slots))))


@dataclasses.dataclass(frozen=True)
class PromptLookup(Untrained):
    """No parameters; the state is the text."""

    heads: PromptLookupConfig

    Config = PromptLookupConfig

    def check(self) -> None:
        for field in ("tokens", "ngram"):
            between(f"{self.name}: {field}", getattr(self.heads, field), 1, MOST_DEEP)

    @property
    def n_heads(self) -> int:
        return self.heads.tokens

    @property
    def least_match(self) -> int:
        return min(LEAST_MATCH, self.heads.ngram)

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> TextState:
        return TextState(
            jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, slots), jnp.int32)
        )

    def commit(
        self, params: Params, backbone: Backbone, state: TextState, new: Committed
    ) -> TextState:
        # All T candidates are written; the next call overwrites those after the n-th.
        write = backbone.kernels.write_rows
        text_BS = write(state.text_BS, new.tokens_BT, state.length_B, axis=1)
        return TextState(state.length_B + new.n_B, text_BS)

    def copied(
        self, state: TextState, root_B: jax.Array, n: int
    ) -> tuple[jax.Array, jax.Array]:
        """The n tokens after the match [B, n], and the length of the match [B], 0 for none."""
        index_1S = jnp.arange(state.text_BS.shape[1])[None, :]
        is_root_BS = index_1S == state.length_B[:, None]
        text_BS = jnp.where(is_root_BS, root_B[:, None], state.text_BS)
        return continuations(text_BS, state.length_B, self.heads.ngram, n)

    def propose(
        self, params: Params, backbone: Backbone, state: TextState, request: DraftRequest
    ) -> Proposal:
        root_B, tree, _ = request
        chain_BL, match_B = self.copied(state, root_B, tree.depth)
        on_chain_M = np.array([False] + [not any(choice) for choice in tree.choices])
        drafted_BM = (match_B > 0)[:, None] & on_chain_M[None, :]
        drafts_BM = chain_BL[:, np.maximum(tree.depth_M - 1, 0)]
        nodes_BM = jnp.where(drafted_BM, drafts_BM, root_B[:, None])
        dtype = at_least_f32(backbone.llama.dtype)
        return propose_given(request, nodes_BM, drafted_BM, self.llama.vocab_size, dtype)
