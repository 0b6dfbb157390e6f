"""Hydra++ (Ankner et al. 2024, sections 6 and 7): Hydra heads on an extra decoder layer.

The heads' b_t is not the backbone's hidden state z_t but the output of one more decoder layer over
z_0 ... z_t (PrefixMLP, section 6.2). The layer caches keys and values of accepted positions and runs
once per decoding step.
"""

import dataclasses
from dataclasses import dataclass

import jax
from jax.typing import DTypeLike

from medusa_jax.heads.causal_layer import CausalLayer, LayerState
from medusa_jax.heads.drafter import Committed, Params, TextRows
from medusa_jax.heads.hydra import Hydra, HydraConfig
from medusa_jax.heads.layers import applied, last_of
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.masks import CausalMask
from medusa_jax.sharding import PyTree


@dataclass(unsafe_hash=True)
class HydraPPConfig(HydraConfig):
    """Section 6: four hidden layers and dropout (teacher loss and decay are set in the trainer)."""

    drafter: str = "hydrapp"
    n_layers: int = 4
    dropout: float = 0.2


@dataclasses.dataclass(frozen=True)
class HydraPP(Hydra):
    """Hydra heads on the output of the prefix layer; the drafter state is that layer's."""

    heads: HydraPPConfig

    Config = HydraPPConfig

    def init(self, key: jax.Array, backbone: Backbone) -> Params:
        """Hydra's initial heads, and a prefix layer that is initially (nearly) the identity."""
        heads_key, prefix_key = jax.random.split(key)
        prefix = CausalLayer.start(prefix_key, self.llama, backbone)
        return super().init(heads_key, backbone) | {"prefix": prefix}

    def _prefix(self, params: Params, backbone: Backbone, *rows: PyTree) -> PyTree:
        dtype, kernels = backbone.llama.dtype, backbone.kernels
        layer = CausalLayer(self.llama, dtype, kernels=kernels)
        return applied(layer, params["prefix"], *rows)

    def features(self, params: Params, backbone: Backbone, rows: TextRows) -> jax.Array:
        inputs = (rows.hidden_BTE, rows.positions_BT, CausalMask(rows.segment_ids_BT))
        context_BTD, _ = self._prefix(params, backbone, *inputs)
        return super().features(params, backbone, rows._replace(hidden_BTE=context_BTD))

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> LayerState:
        return LayerState.zeros(self.llama, 1, batch, slots, dtype)

    def commit(
        self, params: Params, backbone: Backbone, state: LayerState, new: Committed
    ) -> LayerState:
        mask = state.text_mask(backbone.kernels, new.tokens_BT.shape[1])
        after = (state.cache.layers[0], state.length_B, last_of(new.n_B))
        context_B1D, layer = self._prefix(
            params, backbone, new.hidden_BTE, new.positions_BT, mask, *after
        )
        return state.extended([layer], [context_B1D], new.n_B)

    def context(self, state: LayerState) -> jax.Array:
        return state.context_BSD[:, 0]
