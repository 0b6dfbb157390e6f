"""Prompt lookup (Saxena 2023; `prompt_lookup_num_tokens` of transformers): draft the tokens that followed
an earlier occurrence of the last few tokens.

The copied nodes of a tree (`decoding/copies.py`) do this for every drafter. This one drafts nothing else.
"""

import dataclasses
from dataclasses import dataclass

from medusa_jax.arch import HeadsConfig
from medusa_jax.errors import UserError, between
from medusa_jax.heads.drafter import NoDrafter
from medusa_jax.tree.tree import MOST_DEEP, Tree


@dataclass(unsafe_hash=True)
class PromptLookupConfig(HeadsConfig):
    """Fields of prompt lookup."""

    drafter: str = "prompt_lookup"
    lm_head: str = "shared"
    # Tokens of the copied chain; 10 is the default of transformers.
    tokens: int = 10


@dataclasses.dataclass(frozen=True)
class PromptLookup(NoDrafter):
    """No parameters and no state."""

    heads: PromptLookupConfig

    Config = PromptLookupConfig
    trained = False

    def check(self) -> None:
        between(f"{self.name}: tokens", self.heads.tokens, 1, MOST_DEEP)

    @property
    def n_heads(self) -> int:
        return self.heads.tokens

    @property
    def default_tree(self) -> Tree:
        return Tree.copies(self.heads.tokens)

    def check_tree(self, tree: Tree) -> None:
        if tree.drafted.depth:
            raise UserError(f"{self.name} only copies: choose a tree such as --tree copy:4")
