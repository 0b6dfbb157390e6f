"""Windows of texts with the backbone's hidden states, to learn from and to test on."""

from collections.abc import Generator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import Model
from medusa_jax.decoding.request import power_of_two
from medusa_jax.evaluate.ranks import CHUNK
from medusa_jax.evaluate.texts import Text
from medusa_jax.heads.drafter import Drafter, TextRows
from medusa_jax.heads.ranks import label_ranks
from medusa_jax.heads.vocabulary import for_drafting
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.cache import KVCache
from medusa_jax.sharding import Params
from medusa_jax.tree.growth import TextRanks

# Tokens of a window, and at most how many of them are context without a loss. With half of the context, drafters with
# attention learn two thirds as much (research/log/2026-11_smollm2.md).
WIDTH, CONTEXT = 256, 128
# Tokens that the backbone reads at a time.
PIECE = 32


class Window(NamedTuple):
    """A part of a text, as a batch of one row [1, W] for the loss.

    Attributes:
      hidden_1WE: hidden states and tapped streams, in bfloat16.
      counted_1W: tokens to learn, which are one run.
      segments_1W: 1 in the text, 0 after its end.
    """

    hidden_1WE: Any
    tokens_1W: Any
    counted_1W: Any
    segments_1W: Any
    positions_1W: Any


def windows_of(model: Model, text: Text) -> Generator[bool, None, list[Window]]:
    """Read a text, yielding True after each piece; returns the windows of its answer."""
    backbone = model.backbone.tapped(model.drafter.taps)
    n, slots = len(text.ids), power_of_two(len(text.ids) + WIDTH, 512)
    tokens_S: np.ndarray = np.zeros(slots, np.int32)
    tokens_S[:n] = text.ids
    cache = KVCache.zeros(model.config, 1, slots, backbone.llama.dtype)
    pieces = []
    for begin in range(0, n, PIECE):
        piece_1T = tokens_S[None, begin : begin + PIECE]
        piece, cache = _read(backbone, piece_1T, cache, np.array([begin], np.int32))
        pieces.append(np.asarray(piece))
        yield True
    hidden_SE = np.concatenate(pieces)
    windows, at = list[Window](), text.n_prompt
    while at < n - model.drafter.n_heads:
        place_W = max(0, at - CONTEXT) + np.arange(WIDTH, dtype=np.int32)
        inside_W = place_W < n
        hidden_WE = hidden_SE[np.minimum(place_W, len(hidden_SE) - 1)]
        counted_W, segments_W = inside_W & (place_W >= at), inside_W.astype(np.int32)
        row = hidden_WE, tokens_S[place_W], counted_W, segments_W, place_W
        windows.append(Window(*(x[None] for x in row)))
        at = int(place_W[-1]) + 1
    return windows


@jax.jit
def _read(
    backbone: Backbone, piece_1T: jax.Array, cache: KVCache, begin_1: jax.Array
) -> tuple[jax.Array, KVCache]:
    hidden_1TE, cache = backbone.read(piece_1T, cache, begin_1)
    return hidden_1TE[0].astype(jnp.bfloat16), cache


def ranks_in(model: Model, heads: Params, window: Window) -> TextRanks:
    """Ranks of a window's tokens to learn under these heads, where a step may begin."""
    ranks_WK = np.asarray(_ranks(model.drafter, heads, model.backbone, window))
    learned = np.flatnonzero(window.counted_1W[0])
    # A step's root is the token after its position, the deepest head guesses one K places later.
    return TextRanks.of_heads(ranks_WK[learned[: -model.drafter.n_heads] - 1])


@partial(jax.jit, static_argnums=0)
def _ranks(
    drafter: Drafter, heads: Params, backbone: Backbone, window: Window
) -> jax.Array:
    backbone = for_drafting(backbone, heads).tapped(drafter.taps)
    hidden_1WE, tokens_1W, _, segments_1W, positions_1W = window
    hidden_1WE = hidden_1WE.astype(backbone.llama.dtype)
    rows = TextRows(hidden_1WE, tokens_1W, positions_1W, segments_1W)
    features_K1WD = drafter.features(heads, backbone, rows)
    ranks = label_ranks(drafter, heads, backbone, features_K1WD, tokens_1W, CHUNK)
    return ranks[0]
