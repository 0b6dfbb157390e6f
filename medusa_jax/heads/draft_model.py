"""Speculative decoding with a draft model (Leviathan et al. 2023; Chen et al. 2023).

A smaller model with the same tokenizer drafts the tree level by level, each node from its
logits after the node's path. A chain of gamma nodes gives the papers' method; a tree with
branches merges several chains (SpecInfer, Miao et al. 2024). Guesses are ranked like those
of heads, so greedy, sampled and rejection decoding need no special code. The draft model
keeps a cache of the accepted text; keys and values of tree nodes are dropped when the
tree is drafted.
"""

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.errors import between
from medusa_jax.heads.drafter import Committed, Drafter, DraftRequest, Params, Proposal
from medusa_jax.heads.fill import Level, fill_by_level
from medusa_jax.heads.layers import take_last
from medusa_jax.heads.state import CacheState
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.cache import KVCache
from medusa_jax.model.llama import decoding_config
from medusa_jax.sharding import PyTree
from medusa_jax.tree.tree import Tree

# Entry of the parameters that contains the draft model's, as `model/convert.py` prepares them.
MODEL = "model"


@dataclass(unsafe_hash=True)
class DraftModelConfig(HeadsConfig):
    """`n_heads` limits the depth of trees; the draft model itself has no limit."""

    drafter: str = "draft_model"
    n_heads: int = 16
    lm_head: str = "shared"
    # Tokens drafted by default: 4 for a backbone of 7B, 3 for larger ones.
    gamma: int = 4
    arch: LlamaConfig = field(default_factory=LlamaConfig)


class DraftState(CacheState):
    """State of the draft model.

    Attributes:
      hidden_BE: its hidden state of the root, E wide.
    """

    hidden_BE: jax.Array

    def grow(self, slots: int) -> "DraftState":
        return super().grow(slots + 1)


@dataclasses.dataclass(frozen=True)
class DraftModel(Drafter):
    """A second model as the drafter; it has the parameters of a backbone."""

    heads: DraftModelConfig

    Config = DraftModelConfig
    trained = False

    def check(self) -> None:
        between(f"{self.name}: gamma", self.heads.gamma, 1, self.heads.n_heads)

    @property
    def default_tree(self) -> Tree:
        return Tree.chain(self.heads.gamma)

    def _model(self, params: Params, backbone: Backbone) -> Backbone:
        config = decoding_config(self.heads.arch)
        return Backbone(backbone.llama.clone(config=config), params[MODEL])

    def _known(self, tokens: jax.Array) -> jax.Array:
        """The tokens, with its last one for those that the draft model lacks."""
        return jnp.minimum(tokens, self.heads.arch.vocab_size - 1)

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> DraftState:
        cache = KVCache.zeros(self.heads.arch, batch, slots + 1, dtype)
        hidden_BE = jnp.zeros((batch, self.heads.arch.d_model), dtype)
        return DraftState(jnp.zeros((batch,), jnp.int32), cache, hidden_BE)

    def commit(
        self, params: Params, backbone: Backbone, state: DraftState, new: Committed
    ) -> DraftState:
        """One pass over the accepted tokens and the root after them.

        The root's key and value are discarded; the next call overwrites them.
        """
        tokens_BU = jnp.concatenate([new.tokens_BT[:, :1], new.next_tokens_BT], axis=1)
        hidden_BUE, cache = self._model(params, backbone).read(
            self._known(tokens_BU), state.cache, state.length_B
        )
        up_to_root_B = jnp.where(new.n_B > 0, new.n_B + 1, 0)
        hidden_BE = take_last(hidden_BUE, up_to_root_B, state.hidden_BE)
        return DraftState(state.length_B + new.n_B, cache, hidden_BE)

    def propose(
        self, params: Params, backbone: Backbone, state: DraftState, request: DraftRequest
    ) -> Proposal:
        """Draft level by level: run nodes with children after the text, each seeing its path.

        The root runs again along with the first level, which needs its key and value.
        """
        model = self._model(params, backbone)

        def logits_of(
            depth: int, level: Level, tokens_BP: jax.Array, carry: PyTree
        ) -> tuple[jax.Array, PyTree]:
            hidden_BPE, cache = carry
            if depth:
                P, mask_PR = tokens_BP.shape[1], level.mask_PR
                depth_P = np.full(P, depth, np.int32)
                if depth == 1:
                    root_1R = np.eye(1, P + 1, dtype=bool)
                    mask_PR = np.vstack([root_1R, mask_PR])
                    depth_P = np.insert(depth_P, 0, 0)
                    tokens_BP = jnp.concatenate(
                        [request.root_B[:, None], tokens_BP], axis=1
                    )
                rows = jnp.asarray(depth_P), jnp.asarray(mask_PR)
                hidden_BPE, cache = model.read_tree(
                    self._known(tokens_BP), *rows, cache, state.length_B
                )
                hidden_BPE = hidden_BPE[:, -P:]
            logits_BPO = model.lm_head(hidden_BPE)
            # Tokens that the draft model lacks are never drafted; those that the model lacks are cut.
            missing = self.llama.vocab_size - logits_BPO.shape[-1]
            edges, minus_inf = [(0, 0, 0)] * 2, jnp.array(-jnp.inf, logits_BPO.dtype)
            logits_BPO = jax.lax.pad(logits_BPO, minus_inf, [*edges, (0, missing, 0)])
            return logits_BPO, (hidden_BPE, cache)

        root = (state.hidden_BE[:, None], state.cache)
        return fill_by_level(request, model, logits_of, root)
