"""DFlash (Chen et al. 2026) and DSpark (arXiv 2607.05147): a whole block of guesses in one pass.

    c_j = norm(FC([streams of layers i_1 ... i_n at j]))        for every accepted position j
    x = [e(root) ; e(MASK) ; ... ; e(MASK)]                     the block, at the positions after the text
    x = x + Attention(norm(x), keys and values of [c ; norm(x)]); x = x + MLP(norm(x))
    logits of a slot = LM-Head(norm(x))

In every layer, the slots of a block attend to the same c of the text, and to each other in
both directions. The embedding and usually the LM head are the backbone's. The state is the
keys and values of c.

*DFlash*: the root's slot guesses nothing, and slot k guesses the k-th token after the root.
*DSpark*: the root's slot guesses too, so a block has one slot fewer, and a Markov head adds
W2 W1[token before] to the logits of a slot. In a tree, the token before is the parent's, so
one pass gives the guesses of all levels.

In *sliding layers* (SpecForge; speculators' default) a slot sees the last `window` positions of the text, itself, and
the slots before it.

In training every position of a text is the root of a block; slots of row t attend to c up
to t.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.bounds import AtLeast, OneOf
from medusa_jax.errors import UserError, between
from medusa_jax.heads.drafter import (
    Committed,
    DraftRequest,
    Params,
    Proposal,
    TextRows,
    shift_left,
)
from medusa_jax.heads.fill import Level, fill_by_level, fill_by_rank
from medusa_jax.heads.layers import applied, lm_head_logits, lm_head_start
from medusa_jax.heads.state import CacheState
from medusa_jax.heads.tapped import TappedConfig, TappedDrafter, check_numbers, numbers
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.cache import KVCache, Pair
from medusa_jax.model.draft_caches import BlockCache, LayerCache
from medusa_jax.model.layers import (
    Attention,
    DecoderLayer,
    Embed,
    Linear,
    RMSNorm,
    zero_output,
)
from medusa_jax.model.masks import CausalMask, Mask, PathMask
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.rope import rope_tables
from medusa_jax.sharding import PyTree
from medusa_jax.tree.tree import MOST_DEEP

# Blocks of a row of text that training computes at a time.
BLOCKS = 32
# Factor of the first layer's output at the start.
OUTWEIGH = 8.0


@dataclass(unsafe_hash=True)
class DFlashConfig(TappedConfig):
    """`n_heads` guesses per block, `n_layers` layers."""

    drafter: str = "dflash"
    n_heads: int = 15
    n_layers: int = 5
    lm_head: str = "shared"
    # The token whose embedding fills the slots after the root; -1: the last of the vocabulary.
    mask_token: Annotated[int, AtLeast(-1)] = -1
    # Number of layers that are read, if `tap_layers` does not name them.
    n_taps: int = 5
    # Layers that see `window` positions of the text, such as "0,1,2"; empty: none. SpecForge counts them back
    # from each slot, itself included, speculators from the root, itself excluded (`window_at_root`).
    sliding_layers: str = ""
    window: int = 0
    window_at_root: bool = False
    # Layers in which a slot does not see the slots after it.
    causal: Annotated[str, OneOf(("sliding", "all", "none"))] = "sliding"
    # The root's slot guesses the first token after the root.
    root_guesses: bool = False
    # Rank of the Markov head; 0: none.
    markov_rank: int = 0
    # Whether a confidence head estimates the probability that a guess is accepted.
    confidence: bool = False


@dataclasses.dataclass(frozen=True)
class DFlash(TappedDrafter):
    """One pass over a block of slots gives the guesses of all depths."""

    heads: DFlashConfig

    Config = DFlashConfig
    separable = False
    qk_norm = True

    def check(self) -> None:
        super().check()
        h, V = self.heads, self.llama.vocab_size
        between("heads.mask_token", h.mask_token, -1, V - 1)
        if not h.tap_layers:
            between("heads.n_taps", h.n_taps, 1, MOST_DEEP)
        between("heads.markov_rank", h.markov_rank, int(h.confidence), 2**20)
        check_numbers("heads.sliding_layers", h.sliding_layers, h.n_layers - 1)
        if bool(h.sliding_layers) != bool(h.window):
            raise UserError("heads.sliding_layers and heads.window need each other")

    @property
    def stored_counts(self) -> tuple[int, int]:
        return 1, self.heads.n_layers

    @property
    def paper_taps(self) -> tuple[int, ...]:
        """The outputs of n layers at equal distances, from the second to the fourth from the end."""
        L, n = self.llama.n_layers, self.heads.n_taps
        at = (1 + i * (L - 4) / max(n - 1, 1) for i in range(n))
        return tuple(sorted({min(max(round(x) + 1, 1), L) for x in at}))

    @property
    def n_slots(self) -> int:
        return self.n_heads if self.heads.root_guesses else self.n_heads + 1

    def init(self, key: jax.Array, backbone: Backbone) -> Params:
        """c starts as the last tap's stream; the first layer adds its mean to the block, the others nothing.

        No Markov bias, and a confidence of one half.
        """
        h, c, D, A = self.heads, self.shape, self.llama.d_model, len(self.taps)
        layer, at = DecoderLayer(c, jnp.float32), jnp.zeros((1, 1), jnp.int32)
        probe = jnp.zeros((1, 1, D)), rope_tables(c, at, jnp.float32), CausalMask()
        params: Params = {
            f"layers_{j}": zero_output(
                layer.init(jax.random.fold_in(key, j), *probe)["params"]
            )
            for j in range(h.n_layers)
        }
        final_D = backbone.params["norm"]["scale"].astype(jnp.float32)
        params["layers_0"]["self_attn"] |= self.first_attention(key, final_D)
        size = jnp.sqrt(jnp.mean(final_D**2))
        params |= {
            "fc": {"kernel": jnp.eye(A * D, D, -(A - 1) * D)},  # [0 ; 0 ; I]
            "hidden_norm": {"scale": jnp.ones((D,))},
            "norm": {"scale": jnp.broadcast_to(size, (D,))},
        }
        r = h.markov_rank
        if r:
            w1_VR = 0.02 * jax.random.normal(key, (self.llama.vocab_size, r))
            params["markov_w1"] = {"embedding": w1_VR}
            params["markov_w2"] = {"kernel": jnp.zeros((r, backbone.outputs))}
        if h.confidence:
            kernel, bias = jnp.zeros((D + h.markov_rank, 1)), jnp.zeros((1,))
            params["confidence"] = {"kernel": kernel, "bias": bias}
        return {"heads_0": params | lm_head_start(h, backbone)}

    def first_attention(self, key: jax.Array, final_D: jax.Array) -> Params:
        """Value and output kernels of the first layer: its values are a random projection of c, and its output adds
        it to the block, scaled as by the backbone's final norm.

        Large enough to dominate the embeddings: with a tied LM head a slot would otherwise predict its own input
        token.
        """
        c, D = self.shape, self.llama.d_model
        J, R = c.n_kv_heads * c.head_dim, c.n_heads // c.n_kv_heads
        value_DJ = jax.nn.initializers.orthogonal()(key, (D, J))
        # Each of a group's query heads reads the same values and adds its share of them.
        scale_D = OUTWEIGH * final_D / R
        value_GHD = (scale_D[:, None] * value_DJ).T.reshape(c.n_kv_heads, -1, D)
        out_KD = jnp.repeat(value_GHD, R, axis=0).reshape(-1, D)
        return {"v_proj": {"kernel": value_DJ}, "o_proj": {"kernel": out_KD}}

    def first_input(
        self, params: Params, backbone: Backbone, hidden_BTE: jax.Array
    ) -> jax.Array:
        """c [B, T, D]."""
        c, mine, dtype = self.shape, params["heads_0"], backbone.llama.dtype
        kernels, streams = backbone.kernels, hidden_BTE[..., self.llama.d_model :]
        fc = Linear(c.d_model, False, dtype, kernels=kernels)
        norm = RMSNorm(c.rms_eps, dtype, kernels)
        return applied(norm, mine["hidden_norm"], applied(fc, mine["fc"], streams))

    def keys_and_values(
        self,
        params: Params,
        backbone: Backbone,
        hidden_BTE: jax.Array,
        positions_BT: jax.Array,
    ) -> tuple[Pair, ...]:
        """The keys and values of c in every layer."""
        c, mine = self.shape, params["heads_0"]
        dtype, kernels = backbone.llama.dtype, backbone.kernels
        c_BTD = self.first_input(params, backbone, hidden_BTE)
        rope = rope_tables(c, positions_BT, dtype)
        attention = Attention(c, dtype, 0, kernels)
        layers = (mine[f"layers_{j}"]["self_attn"] for j in range(self.heads.n_layers))
        # The compiler drops the unused output.
        return tuple(
            applied(attention, layer, c_BTD, rope, CausalMask())[1] for layer in layers
        )

    def caches(
        self, text: Sequence[Pair], root_BA: jax.Array, visible_BAS: jax.Array
    ) -> list[BlockCache]:
        """By layer, what the blocks of A roots see.

        Args:
          root_BA: the slots of the text that the roots will have.
          visible_BAS: the slots of the text before each root.
        """
        h, K, S = self.heads, self.n_slots, visible_BAS.shape[2]
        visible_BQS = jnp.repeat(visible_BAS, K, axis=1)
        # The slot of the text that a window ends with.
        end_K = np.full(K, -1) if h.window_at_root else np.arange(K)
        end_BQ = (root_BA[:, :, None] + end_K[None, None]).reshape(len(root_BA), -1)
        near_BQS = end_BQ[..., None] - jnp.arange(S)[None, None] < h.window
        sliding, caches = numbers(h.sliding_layers), []
        for j, pair in enumerate(text):
            causal = h.causal == "all" or (h.causal == "sliding" and j in sliding)
            mask_KK = jnp.asarray(np.tri(K, k=0 if causal else K, dtype=bool))
            seen_BQS = visible_BQS & near_BQS if j in sliding else visible_BQS
            caches.append(BlockCache(pair, seen_BQS, mask_KK))
        return caches

    def block(self, backbone: Backbone, root_BT: jax.Array) -> jax.Array:
        """The input of the blocks of these roots: [B, T * slots, D]."""
        B, T = root_BT.shape
        mask = self.heads.mask_token % self.llama.vocab_size
        masks = jnp.full((B, T, self.n_slots - 1), mask, root_BT.dtype)
        tokens_BTK = jnp.concatenate([root_BT[:, :, None], masks], axis=-1)
        return backbone.embed(tokens_BTK.reshape(B, -1))

    def guesses(
        self,
        params: Params,
        backbone: Backbone,
        root_BT: jax.Array,
        position_BT: jax.Array,
        caches: Sequence[LayerCache],
        start_B: jax.Array | None = None,
    ) -> jax.Array:
        """Inputs of the LM head for all guesses after the roots: [B, T, K, D].

        Args:
          position_BT: positions of the roots.
          caches: by layer, a `BlockCache`; or, for one root a row, keys and values of c with free slots from
            `start_B` on, if the kernels run layers.
        """
        B, T = root_BT.shape
        slots_K = jnp.arange(self.n_slots, dtype=position_BT.dtype)
        positions_BQ = (position_BT[:, :, None] + slots_K[None, None]).reshape(B, -1)
        c, mine, dtype = self.shape, params["heads_0"], backbone.llama.dtype
        kernels = backbone.kernels
        rope = rope_tables(c, positions_BQ, dtype)
        mask: Mask = CausalMask()  # a `BlockCache` does not read it
        if start_B is not None:
            mask = PathMask(jnp.ones((self.n_slots, self.n_slots), bool))
        x_BQD = self.block(backbone, root_BT).astype(dtype)
        for j, cache in enumerate(caches):
            layer = DecoderLayer(c, dtype, kernels=kernels)
            context = rope, mask, cache, start_B
            x_BQD, _ = applied(layer, mine[f"layers_{j}"], x_BQD, *context)
        out_BQD = applied(RMSNorm(c.rms_eps, dtype, kernels), mine["norm"], x_BQD)
        return out_BQD.reshape(B, T, self.n_slots, -1)[:, :, -self.n_heads :]

    def embed_previous(
        self, params: Params, dtype: DTypeLike, tokens: jax.Array
    ) -> jax.Array:
        """W1 of the token before a guess: [...] -> [..., R]."""
        embed = Embed(self.llama.vocab_size, self.heads.markov_rank, dtype=dtype)
        return applied(embed, params["heads_0"]["markov_w1"], tokens)

    def features(self, params: Params, backbone: Backbone, rows: TextRows) -> jax.Array:
        """Features [K, B, T, D], with a Markov head [.., D + R]: W1 of the previous token is appended."""
        B, T = rows.tokens_BT.shape
        index_BA = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        return self.features_at(params, backbone, rows, index_BA)

    def features_at(
        self, params: Params, backbone: Backbone, rows: TextRows, index_BA: jax.Array
    ) -> jax.Array:
        hidden_BTE, tokens_BT, positions_BT, segment_ids_BT, _ = rows
        (B, A), T, dtype = index_BA.shape, tokens_BT.shape[1], backbone.llama.dtype
        text = self.keys_and_values(params, backbone, hidden_BTE, positions_BT)
        n = -(-A // BLOCKS)

        def blocks(x_BA: jax.Array) -> jax.Array:
            """[B, A] -> [n, B, BLOCKS]."""
            x_BA = jnp.pad(x_BA, ((0, 0), (0, n * BLOCKS - A)))
            return jnp.moveaxis(x_BA.reshape(B, n, BLOCKS), 1, 0)

        def at_index(x_BT: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x_BT, index_BA, axis=1)

        @jax.checkpoint
        def block_features(inputs: tuple[jax.Array, ...]) -> jax.Array:
            at_BQ, segment_BQ, root_BQ, position_BQ = inputs
            visible_BQT = jnp.arange(T)[None, None] <= at_BQ[..., None]
            visible_BQT &= segment_ids_BT[:, None] == segment_BQ[..., None]
            caches = self.caches(text, at_BQ + 1, visible_BQT)
            return self.guesses(params, backbone, root_BQ, position_BQ, caches)

        inputs = (index_BA, at_index(segment_ids_BT), at_index(shift_left(tokens_BT, 1)),
                  at_index(positions_BT) + 1)  # fmt: skip
        out = lax.map(block_features, tuple(map(blocks, inputs)))  # [n, B, BLOCKS, K, D]
        out = jnp.moveaxis(out, 0, 1).reshape(B, n * BLOCKS, self.n_heads, -1)[:, :A]
        features_KBAD = jnp.moveaxis(out, 2, 0)
        if not self.heads.markov_rank:
            return features_KBAD
        before = [at_index(shift_left(tokens_BT, k + 1)) for k in range(self.n_heads)]
        previous_KBAR = self.embed_previous(params, dtype, jnp.stack(before))
        return jnp.concatenate([features_KBAD, previous_KBAR], axis=-1)

    def head_logits(
        self, params: Params, backbone: Backbone, k: int, features: jax.Array
    ) -> jax.Array:
        D = self.llama.d_model
        slot_features = features[..., :D]
        logits = lm_head_logits(self.heads, params["heads_0"], backbone, slot_features)
        if self.heads.markov_rank:
            logits += self.bias(params, backbone, features[..., D:])
        return logits

    @property
    def head_entries(self) -> tuple[str, ...]:
        return "lm_head", "markov_w2", "confidence"

    @property
    def has_confidence(self) -> bool:
        return self.heads.confidence

    def confidence(self, params: Params, features: jax.Array) -> jax.Array:
        linear = Linear(1, True, at_least_f32(features.dtype))
        return applied(linear, params["heads_0"]["confidence"], features)[..., 0]

    def bias(self, params: Params, backbone: Backbone, inputs: jax.Array) -> jax.Array:
        """The Markov head's part of the logits: [..., R] -> [..., O]."""
        dtype = backbone.llama.dtype
        linear = Linear(backbone.outputs, False, dtype, kernels=backbone.kernels)
        bias = applied(linear, params["heads_0"]["markov_w2"], inputs)
        return bias.astype(at_least_f32(dtype))

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> CacheState:
        cache = KVCache.zeros(self.shape, batch, slots, dtype, self.heads.n_layers)
        return CacheState(jnp.zeros((batch,), jnp.int32), cache)

    def commit(
        self, params: Params, backbone: Backbone, state: CacheState, new: Committed
    ) -> CacheState:
        pairs = self.keys_and_values(params, backbone, new.hidden_BTE, new.positions_BT)
        layers = tuple(
            backbone.kernels.write_both(old, pair, state.length_B)
            for old, pair in zip(state.cache.layers, pairs, strict=True)
        )
        return CacheState(state.length_B + new.n_B, KVCache(layers=layers))

    def propose(
        self, params: Params, backbone: Backbone, state: CacheState, request: DraftRequest
    ) -> Proposal:
        """One pass over the block; the LM head reads only the slots of the tree's depths."""
        length_B, texts = state.length_B, state.cache.layers
        plain = not self.heads.sliding_layers and self.heads.causal != "all"
        one_call = plain and backbone.kernels.runs_layers(self.shape.head_dim)
        caches: Sequence[LayerCache]
        if one_call:
            padding = (0, 0), (0, 0), (0, self.n_slots), (0, 0)
            caches = [(jnp.pad(k, padding), jnp.pad(v, padding)) for k, v in texts]
        else:
            visible_B1S = (jnp.arange(state.cache.slots)[None] < length_B[:, None])[:, None]
            caches = self.caches(texts, length_B[:, None], visible_B1S)
        root = request.root_B[:, None], length_B[:, None]
        start_B = length_B if one_call else None
        x_B1KD = self.guesses(params, backbone, *root, caches, start_B)
        depth, dtype = request.tree.depth, backbone.llama.dtype
        mine, x_BKD = params["heads_0"], x_B1KD[:, 0, :depth]
        logits_BKO = lm_head_logits(self.heads, mine, backbone, x_BKD)
        if not self.heads.markov_rank:
            return fill_by_rank(request, backbone, [logits_BKO[:, k] for k in range(depth)])

        def logits_of(
            depth: int, level: Level, tokens_BP: jax.Array, carry: PyTree
        ) -> tuple[jax.Array, PyTree]:
            previous_BPR = self.embed_previous(params, dtype, tokens_BP)
            bias_BPO = self.bias(params, backbone, previous_BPR)
            return logits_BKO[:, depth, None] + bias_BPO, carry

        return fill_by_level(request, backbone, logits_of, ())


@dataclass(unsafe_hash=True)
class DSparkConfig(DFlashConfig):
    """The sizes of the paper: two layers, seven guesses, a Markov head of rank 256."""

    drafter: str = "dspark"
    n_heads: int = 7
    n_layers: int = 2
    root_guesses: bool = True
    markov_rank: int = 256


@dataclasses.dataclass(frozen=True)
class DSpark(DFlash):
    """DFlash whose root's slot guesses too, with a Markov head."""

    heads: DSparkConfig

    Config = DSparkConfig
