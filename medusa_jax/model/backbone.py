"""The backbone with its parameters: what drafters, the decode loop, the calibrator and training call."""

import dataclasses

import jax
import jax.numpy as jnp

from medusa_jax.model.cache import KVCache
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.llama import Llama
from medusa_jax.sharding import Params, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Backbone:
    """The backbone with its parameters.

    Drafters use its embedding and LM head; the decode loop and the calibrator run it over text. In
    training it may have low-rank adapters (`model/lora.py`).

    Attributes:
      ids_O: the token ids that its LM head scores, ascending (`heads/vocabulary.py`): logit j belongs
        to token ids[j]. None: all tokens, O = V.
    """

    llama: Llama = dataclasses.field(metadata={"static": True})
    params: Params
    lora: Params | None = None
    ids_O: jax.Array | None = None

    @property
    def outputs(self) -> int:
        """O, the number of tokens that its LM head scores."""
        return self.llama.config.vocab_size if self.ids_O is None else self.ids_O.shape[0]

    @property
    def scored(self) -> int | jax.Array:
        """The tokens that its LM head scores: their ids [O], or V for all."""
        return self.outputs if self.ids_O is None else self.ids_O

    def ids_of(self, columns: jax.Array) -> jax.Array:
        """Token ids of columns of the logits."""
        return columns if self.ids_O is None else self.ids_O[columns]

    def columns_of(self, ids: jax.Array) -> jax.Array:
        """Columns of these tokens in the logits; O (out of range) for tokens without a logit."""
        if self.ids_O is None:
            return ids
        column = jnp.searchsorted(self.ids_O, ids)
        is_scored = self.ids_O[jnp.minimum(column, self.outputs - 1)] == ids
        return jnp.where(is_scored, column, self.outputs)

    def of_scored(self, x: jax.Array) -> jax.Array:
        """Entries of an array [..., V] for the scored tokens: [..., O]."""
        return x if self.ids_O is None else x[..., self.ids_O]

    @property
    def kernels(self) -> Kernels:
        """The operations that differ by platform."""
        return self.llama.kernels

    @property
    def only_lm_head(self) -> "Backbone":
        """The backbone with only the parameters that `lm_head` reads."""
        name = "embed_tokens" if self.llama.config.tie_embeddings else "lm_head"
        params = {key: self.params[key] for key in self.params if key == name}
        lora = None
        if self.lora is not None:
            lora = {key: self.lora[key] for key in self.lora if key == "lm_head"}
        return dataclasses.replace(self, params=params, lora=lora)

    def tapped(self, taps: tuple[int, ...]) -> "Backbone":
        """The backbone with the streams of these layers appended to its hidden states."""
        return dataclasses.replace(self, llama=self.llama.clone(taps=taps))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [...] -> embeddings [..., D]."""
        return self._apply("embed", tokens)

    def lm_head(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] or [..., E] -> logits [..., O], float32 or wider."""
        return self._apply("lm_head", hidden)

    def forward(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array
    ) -> jax.Array:
        """Teacher-forced hidden states [B, T, E]; see `Llama.forward`."""
        return self._apply("forward", tokens_BT, positions_BT, segment_ids_BT)

    def read(
        self,
        tokens_BT: jax.Array,
        cache: KVCache,
        start_B: jax.Array,
        count_B: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states of the next tokens of a cached text; see `Llama.read`."""
        return self._apply("read", tokens_BT, cache, start_B, count_B)

    def read_tree(
        self,
        tokens_BT: jax.Array,
        depth_T: jax.Array,
        mask_TR: jax.Array,
        cache: KVCache,
        start_B: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states of tree nodes after a cached text; see `Llama.read_tree`."""
        return self._apply("read_tree", tokens_BT, depth_T, mask_TR, cache, start_B)

    def _apply(self, method: str, *args: PyTree) -> PyTree:
        variables = {"params": self.params}
        if self.lora is not None:
            variables["lora"] = self.lora
        return self.llama.apply(variables, *args, method=method)
