"""DFlash (Chen et al. 2026) and DSpark (arXiv 2607.05147): a whole block of guesses in one pass.

    c_j = norm(FC([streams of layers i_1 ... i_n at j]))        for every accepted position j
    x = [e(root) ; e(MASK) ; ... ; e(MASK)]                     the block, at the positions after the text
    x = x + Attention(norm(x), keys and values of [c ; norm(x)]); x = x + MLP(norm(x))
    logits of a slot = LM-Head(norm(x))

The slots of a block see the text's c, the same c in every layer, and each other in both directions. The
embedding and usually the LM head are the backbone's. The state is the keys and values of c.

*DFlash*: the root's slot guesses nothing, and slot k guesses the k-th token after the root. *DSpark*: the
root's slot guesses too, so a block has one slot fewer, and a Markov head adds W2 W1[token before] to the
logits of a slot. The token before is the parent's in a tree, so the levels of any tree get their guesses from
one pass.

In training every position of a text is the root of a block; slots of row t see c up to t.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import (
    Backbone,
    Committed,
    DraftRequest,
    Params,
    Proposal,
    TextRows,
    shift_left,
)
from medusa_jax.heads.fill import Level, fill_by_level, fill_by_rank
from medusa_jax.heads.layers import applied, lm_head_logits, lm_head_start
from medusa_jax.heads.state import PositionState
from medusa_jax.heads.tapped import Tapped
from medusa_jax.model.attention import (
    CausalMask,
    Pair,
    attend_part,
    flat,
    group_queries,
    merge_parts,
    write_both,
)
from medusa_jax.model.cache import KVCache
from medusa_jax.model.layers import Embed, Linear, Mlp, RMSNorm
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.rope import rope_tables, rotate
from medusa_jax.sharding import PyTree

# Blocks of a row of text that training computes at a time.
BLOCKS = 32


@dataclass(unsafe_hash=True)
class DFlashConfig(HeadsConfig):
    """`n_heads` guesses per block, `n_layers` layers; fields from `tap_layers` on as in `Tapped`."""

    drafter: str = "dflash"
    n_heads: int = 15
    n_layers: int = 5
    lm_head: str = "shared"
    # The token whose embedding fills the slots after the root; -1: the last of the vocabulary.
    mask_token: int = -1
    # Number of layers that are read, if `tap_layers` does not name them.
    n_taps: int = 5
    tap_layers: str = ""
    attention_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    d_ff: int = 0
    rope_theta: float = 0.0
    # The root's slot guesses the first token after the root.
    root_guesses: bool = False
    # Rank of the Markov head; 0: none.
    markov_rank: int = 0


class BlockAttention(nn.Module):
    """Attention of blocks over keys and values of the text and of themselves."""

    config: LlamaConfig
    dtype: DTypeLike

    def setup(self) -> None:
        c, dtype = self.config, self.dtype
        self.q_proj = Linear(c.n_heads * c.head_dim, False, dtype)
        self.k_proj = Linear(c.n_kv_heads * c.head_dim, False, dtype)
        self.v_proj = Linear(c.n_kv_heads * c.head_dim, False, dtype)
        self.o_proj = Linear(c.d_model, False, dtype)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.rms_eps, dtype)
            self.k_norm = RMSNorm(c.rms_eps, dtype)

    def pair(self, x_BTD: jax.Array, rope: Pair) -> Pair:
        """Keys and values [B, G, T, H] of c or of the slots of a block."""
        c = self.config
        shape = (*x_BTD.shape[:2], c.n_kv_heads, c.head_dim)
        k_BTGH, v_BTGH = (
            self.k_proj(x_BTD).reshape(shape),
            self.v_proj(x_BTD).reshape(shape),
        )
        k_BTGH = rotate(self.k_norm(k_BTGH) if c.qk_norm else k_BTGH, *rope)
        return k_BTGH.transpose(0, 2, 1, 3), v_BTGH.transpose(0, 2, 1, 3)

    def __call__(
        self, x_BQD: jax.Array, rope: Pair, text: Pair, visible_BTS: jax.Array
    ) -> jax.Array:
        """The output [B, Q, D] of T blocks, Q = T x slots.

        Args:
          text: keys and values [B, G, S, H] of c.
          visible_BTS: the positions of the text that each block sees.
        """
        c, (B, T, _) = self.config, visible_BTS.shape
        n_slots = x_BQD.shape[1] // T
        q_BQNH = self.q_proj(x_BQD).reshape(B, -1, c.n_heads, c.head_dim)
        q_BQNH = rotate(self.q_norm(q_BQNH) if c.qk_norm else q_BQNH, *rope)
        q_BGQRH = group_queries(q_BQNH, c.n_kv_heads)

        def by_block(x: jax.Array) -> jax.Array:
            """[B, G, Q, ...] -> [B T, G, slots, ...]."""
            x = x.reshape(*x.shape[:2], T, n_slots, *x.shape[3:])
            return jnp.moveaxis(x, 2, 1).reshape(B * T, -1, *x.shape[3:])

        def by_row(x: jax.Array) -> jax.Array:
            x = jnp.moveaxis(x.reshape(B, T, *x.shape[1:]), 1, 2)
            return x.reshape(B, x.shape[1], T * n_slots, *x.shape[4:])

        k, v = (by_block(x) for x in self.pair(x_BQD, rope))
        both_ways = jnp.ones((1, n_slots, n_slots), bool)
        part = jax.tree.map(by_row, attend_part(by_block(q_BGQRH), k, v, both_ways))
        visible_BQS = jnp.repeat(visible_BTS, n_slots, axis=1)
        part = merge_parts(part, attend_part(q_BGQRH, *text, visible_BQS))
        return self.o_proj(flat(part.out_BGTRH.astype(q_BQNH.dtype)))


class BlockLayer(nn.Module):
    """A decoder layer over the slots of blocks."""

    config: LlamaConfig
    dtype: DTypeLike

    def setup(self) -> None:
        c, dtype = self.config, self.dtype
        self.input_layernorm = RMSNorm(c.rms_eps, dtype)
        self.self_attn = BlockAttention(c, dtype)
        self.post_attention_layernorm = RMSNorm(c.rms_eps, dtype)
        self.mlp = Mlp(c, dtype, 0)

    def __call__(
        self, x_BQD: jax.Array, rope: Pair, text: Pair, visible_BTS: jax.Array
    ) -> jax.Array:
        x_BQD += self.self_attn(self.input_layernorm(x_BQD), rope, text, visible_BTS)
        return x_BQD + self.mlp(self.post_attention_layernorm(x_BQD))


class Layers(nn.Module):
    """FC and its norm, the layers, the norm before the LM head."""

    config: LlamaConfig
    dtype: DTypeLike
    n_layers: int

    def setup(self) -> None:
        c, dtype = self.config, self.dtype
        self.fc = Linear(c.d_model, False, dtype)
        self.hidden_norm = RMSNorm(c.rms_eps, dtype)
        self.layers = [BlockLayer(c, dtype) for _ in range(self.n_layers)]
        self.norm = RMSNorm(c.rms_eps, dtype)

    def text(self, streams: jax.Array, positions_BT: jax.Array) -> tuple[Pair, ...]:
        """Tapped streams [B, T, A D] -> the keys and values of c in every layer."""
        c_BTD = self.hidden_norm(self.fc(streams))
        rope = rope_tables(self.config, positions_BT, self.dtype)
        return tuple(layer.self_attn.pair(c_BTD, rope) for layer in self.layers)

    def __call__(
        self,
        x_BQD: jax.Array,
        positions_BQ: jax.Array,
        text: tuple[Pair, ...],
        visible_BTS: jax.Array,
    ) -> jax.Array:
        """Blocks [B, Q, D] -> inputs of the LM head; arguments as of `BlockAttention`."""
        rope = rope_tables(self.config, positions_BQ, self.dtype)
        x_BQD = x_BQD.astype(self.dtype)
        for layer, pair in zip(self.layers, text, strict=True):
            x_BQD = layer(x_BQD, rope, pair, visible_BTS)
        return self.norm(x_BQD)

    def all(self, streams: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Run every part once, to initialise all parameters."""
        text = self.text(streams, positions_BT)
        x_BTD = jnp.zeros((*positions_BT.shape, self.config.d_model))
        return self(x_BTD, positions_BT, text, jnp.ones((1, 1, 1), bool))


class ContextState(PositionState):
    """Keys and values of c at accepted positions."""

    cache: KVCache

    def grow(self, slots: int) -> "ContextState":
        return self.replace(cache=self.cache.grow(slots))


@dataclasses.dataclass(frozen=True)
class DFlash(Tapped):
    """One pass over a block of slots gives the guesses of all depths."""

    heads: DFlashConfig

    name = "dflash"
    Config = DFlashConfig
    separable = False
    qk_norm = True

    def check(self) -> None:
        super().check()
        h, V = self.heads, self.llama.vocab_size
        if not -1 <= h.mask_token < V:
            raise UserError(f"heads.mask_token is from -1 to {V - 1}, not {h.mask_token}")
        if not h.tap_layers and h.n_taps < 1:
            raise UserError(f"heads.n_taps is at least 1, not {h.n_taps}")
        if h.markov_rank < 0:
            raise UserError(f"heads.markov_rank is at least 0, not {h.markov_rank}")

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
        """Slots of a block."""
        return self.n_heads + (not self.heads.root_guesses)

    def run(self, params: Params, dtype: DTypeLike, *args: PyTree, method: str) -> PyTree:
        module = Layers(self.shape, dtype, self.heads.n_layers)
        return module.apply({"params": params["heads_0"]}, *args, method=method)

    def init(self, key: jax.Array, backbone: Backbone) -> Params:
        """Random layers, since no hidden state passes through them unchanged; no Markov bias."""
        h = self.heads
        module = Layers(self.shape, jnp.float32, h.n_layers)
        streams = jnp.zeros((1, 1, len(self.taps) * self.llama.d_model))
        one = jnp.ones((1, 1), jnp.int32)
        params: Params = dict(module.init(key, streams, one, method="all")["params"])
        if r := h.markov_rank:
            w1_VR = 0.02 * jax.random.normal(key, (self.llama.vocab_size, r))
            params["markov_w1"] = {"embedding": w1_VR}
            params["markov_w2"] = {"kernel": jnp.zeros((r, backbone.outputs))}
        return {"heads_0": params | lm_head_start(h, backbone)}

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
        text: tuple[Pair, ...],
        visible_BTS: jax.Array,
    ) -> jax.Array:
        """Inputs of the LM head for all guesses after the roots: [B, T, K, D].

        Args:
          position_BT: positions of the roots.
          text: keys and values of c by layer.
          visible_BTS: the positions of the text that each root sees.
        """
        B, T = root_BT.shape
        slots_K = jnp.arange(self.n_slots, dtype=position_BT.dtype)
        positions_BQ = (position_BT[:, :, None] + slots_K[None, None]).reshape(B, -1)
        x_BQD = self.block(backbone, root_BT)
        dtype = backbone.llama.dtype
        out_BQD = self.run(
            params, dtype, x_BQD, positions_BQ, text, visible_BTS, method="__call__"
        )
        return out_BQD.reshape(B, T, self.n_slots, -1)[:, :, -self.n_heads :]

    def after(self, params: Params, dtype: DTypeLike, tokens: jax.Array) -> jax.Array:
        """W1 of the token before a guess: [...] -> [..., R]."""
        embed = Embed(self.llama.vocab_size, self.heads.markov_rank, dtype=dtype)
        return applied(embed, params["heads_0"]["markov_w1"], tokens)

    def features(self, params: Params, backbone: Backbone, rows: TextRows) -> jax.Array:
        """With a Markov head [K, B, T, D + R]: W1 of the token before is part of a guess's input."""
        hidden_BTE, tokens_BT, positions_BT, segment_ids_BT, _ = rows
        (B, T), dtype = tokens_BT.shape, backbone.llama.dtype
        streams = hidden_BTE[..., self.llama.d_model :]
        text = self.run(params, dtype, streams, positions_BT, method="text")
        n = -(-T // BLOCKS)
        pad = partial(jnp.pad, pad_width=((0, 0), (0, n * BLOCKS - T)))
        root_BT, position_BT = pad(shift_left(tokens_BT, 1)), pad(positions_BT + 1)
        mask = CausalMask(pad(segment_ids_BT))
        text = jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, n * BLOCKS - T), (0, 0))), text
        )

        @jax.checkpoint
        def some(begin: jax.Array) -> jax.Array:
            cut = partial(lax.dynamic_slice_in_dim, start_index=begin, slice_size=BLOCKS)
            visible_BTS = mask.visible(begin, BLOCKS, 0, n * BLOCKS)
            roots = cut(root_BT, axis=1), cut(position_BT, axis=1)
            return self.guesses(params, backbone, *roots, text, visible_BTS)

        out = lax.map(some, jnp.arange(n, dtype=jnp.int32) * BLOCKS)  # [n, B, BLOCKS, K, D]
        out = jnp.moveaxis(out, 0, 1).reshape(B, n * BLOCKS, self.n_heads, -1)[:, :T]
        features_KBTD = jnp.moveaxis(out, 2, 0)
        if not self.heads.markov_rank:
            return features_KBTD
        before = [shift_left(tokens_BT, k + 1) for k in range(self.n_heads)]
        after_KBTR = self.after(params, dtype, jnp.stack(before))
        return jnp.concatenate([features_KBTD, after_KBTR], axis=-1)

    def head_logits(
        self, params: Params, backbone: Backbone, k: int, features: jax.Array
    ) -> jax.Array:
        D = self.llama.d_model
        own = features[..., :D]
        logits = lm_head_logits(self.heads, params["heads_0"], backbone, own)
        if self.heads.markov_rank:
            logits += self.bias(params, backbone, features[..., D:])
        return logits

    def bias(self, params: Params, backbone: Backbone, after: jax.Array) -> jax.Array:
        """The Markov head's part of the logits: [..., R] -> [..., O]."""
        dtype = backbone.llama.dtype
        linear = Linear(backbone.outputs, False, dtype)
        bias = applied(linear, params["heads_0"]["markov_w2"], after)
        return bias.astype(at_least_f32(dtype))

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> ContextState:
        c = self.shape
        sizes = (self.heads.n_layers, batch, slots, c.n_kv_heads, c.head_dim)
        return ContextState(jnp.zeros((batch,), jnp.int32), KVCache.zeros(*sizes, dtype))

    def commit(
        self, params: Params, backbone: Backbone, state: ContextState, new: Committed
    ) -> ContextState:
        streams, dtype = new.hidden_BTE[..., self.llama.d_model :], backbone.llama.dtype
        pairs = self.run(params, dtype, streams, new.positions_BT, method="text")
        layers = tuple(
            write_both(old, pair, state.length_B)
            for old, pair in zip(state.cache.layers, pairs, strict=True)
        )
        return ContextState(state.length_B + new.n_B, KVCache(layers=layers))

    def propose(
        self, params: Params, backbone: Backbone, state: ContextState, request: DraftRequest
    ) -> Proposal:
        """One pass over the block; the LM head reads only the slots of the tree's depths."""
        slots_S = jnp.arange(state.cache.slots)
        visible_B1S = (slots_S[None] < state.length_B[:, None])[:, None]
        root_B1, position_B1 = request.root_B[:, None], state.length_B[:, None]
        x_B1KD = self.guesses(
            params, backbone, root_B1, position_B1, state.cache.layers, visible_B1S
        )
        depth, dtype = request.tree.depth, backbone.llama.dtype
        own = self.heads, params["heads_0"], backbone
        logits_BKO = lm_head_logits(*own, x_B1KD[:, 0, :depth])
        if not self.heads.markov_rank:
            return fill_by_rank(request, backbone, [logits_BKO[:, k] for k in range(depth)])

        def logits_of(
            depth: int, level: Level, tokens_BP: jax.Array, carry: PyTree
        ) -> tuple[jax.Array, PyTree]:
            after_BPR = self.after(params, dtype, tokens_BP)
            bias_BPO = self.bias(params, backbone, after_BPR)
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

    name = "dspark"
    Config = DSparkConfig
