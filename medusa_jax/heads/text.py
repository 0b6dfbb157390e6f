"""The text so far as drafter state, for drafters that read it."""

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.heads.drafter import Committed
from medusa_jax.heads.state import PositionState


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

    def grown(self, slots: int) -> "TextState":
        """The same text with room for `slots` tokens."""
        more = slots - self.text_BS.shape[1]
        return self.replace(text_BS=jnp.pad(self.text_BS, ((0, 0), (0, more))))
