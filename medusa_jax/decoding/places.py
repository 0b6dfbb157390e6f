"""The places where tokens are chosen, and how a request's options change the logits there.

The options are part of the verifier, and each place has its own text: a tree node's text includes its
path. Drafted text therefore equals plain decoding's with the same options.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from medusa_jax.decoding.acceptance import Drafts
from medusa_jax.decoding.penalties import counts_down_paths, penalise
from medusa_jax.decoding.repeats import bar_repeats, node_texts
from medusa_jax.decoding.sampling import Sampling
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.decoding.token_sets import only
from medusa_jax.model.backbone import Backbone


class Places(NamedTuple):
    """P places in each row's text where the next token is chosen.

    Attributes:
      text_BPS: the text up to each place; None bars no n-grams.
      last_BP: index of its last token.
      counts_BPV: how often every token occurs in the generated text there; None without penalties.
      depth_P: number of tokens after the root up to the place, which the row's counters do not include.
      allowed_BPW: the tokens that a constraint allows (`token_sets`); None: all.
    """

    text_BPS: jax.Array | None
    last_BP: jax.Array
    counts_BPV: jax.Array | None
    depth_P: jax.Array
    allowed_BPW: jax.Array | None = None


def after_text(sampling: Sampling, text_BS: jax.Array | None, last_B: jax.Array) -> Places:
    """The place after each row's text.

    Args:
      text_BS: the texts; None: no n-grams are barred.
      last_B: index of the last token.
    """
    text_B1S = None if text_BS is None else text_BS[:, None]
    penalties = sampling.penalties
    counts_B1V = None if penalties is None else penalties.counts_BV[:, None]
    return Places(text_B1S, last_B[:, None], counts_B1V, jnp.zeros((1,), jnp.int32))


def after_nodes(engine: Engine, state: DecodeState, drafts: Drafts) -> Places:
    """The places after the tree's nodes [B, M]."""
    tree, nodes_BM = drafts.tree, drafts.nodes_BM
    text_BMS, penalties = None, state.sampling.penalties
    depth_M = jnp.asarray(tree.depth_M)
    if engine.no_repeat_ngram_size:
        assert state.text_BS is not None  # `Engine.keeps_text`
        text_BMS = node_texts(state.text_BS, state.length_B, nodes_BM, tree)
    counts_BMV = None
    if penalties is not None:
        counts_BMV = counts_down_paths(penalties.counts_BV, nodes_BM, tree)
    last_BM = state.length_B[:, None] + depth_M[None, :]
    return Places(text_BMS, last_BM, counts_BMV, depth_M, drafts.allowed_BMW)


def adjust(
    engine: Engine,
    sampling: Sampling,
    backbone: Backbone,
    places: Places,
    logits_BPO: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Apply n-gram bars, then biases and penalties, then the constraint.

    Args:
      backbone: maps the logits to tokens.

    Returns: the logits with n-gram bars only, for the reported log-probabilities, and the logits to
      choose from.
    """
    if places.text_BPS is not None:
        n, columns_of = engine.no_repeat_ngram_size, backbone.columns_of
        text = places.text_BPS, places.last_BP
        logits_BPO = bar_repeats(logits_BPO, *text, n, columns_of, sampling.barred_B)
    scores_BPO = logits_BPO
    if places.counts_BPV is not None:
        assert sampling.penalties is not None
        penalties = sampling.penalties.at(backbone.of_scored)
        counts_BPO = backbone.of_scored(places.counts_BPV)
        scores_BPO = penalise(logits_BPO, penalties, counts_BPO, places.depth_P)
    return logits_BPO, only(scores_BPO, places.allowed_BPW)
