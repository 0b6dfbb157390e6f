"""Draft vocabulary: heads score only the tokens that the model writes often.

The LM head is most of the bytes that a head reads, and nearly all of a model's text uses a small part
of its vocabulary (FR-Spec, Zhao et al. 2025, arXiv 2502.14856; EAGLE-3 has the same as `d2t`). The
chosen ids are stored in ascending order under "draft_vocab" of the heads' parameters:

    ids        [O] int32; logit j of a head belongs to token ids[j]
    lm_head    {"kernel": [D, O]}: these columns of the backbone's LM head, if heads share it;
               created when heads are loaded for decoding, never stored in files

Verification covers the whole vocabulary: tokens outside the draft vocabulary are never drafted, and
every lossless rule stays lossless.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.heads.drafter import Params
from medusa_jax.model.backbone import Backbone

# The entry of the parameters, and the frozen group of a training run.
GROUP = "draft_vocab"
# File of token counts [V], next to the text that was counted.
COUNTS = "vocab_counts.npy"


def for_drafting(backbone: Backbone, heads: Params) -> Backbone:
    """The backbone for drafting with loaded heads: its LM head is replaced by the heads' `lm_head`.

    Without a draft vocabulary, returns the backbone unchanged. If the heads do not share the LM head, the
    result has none.
    """
    if GROUP not in heads:
        return backbone
    vocab = heads[GROUP]
    return _scoring(backbone, vocab["ids"], vocab.get("lm_head"))


def narrowed(backbone: Backbone, ids_O: jax.Array) -> Backbone:
    """The backbone for training heads: its LM head, and the adapter on it, limited to these tokens."""
    kernel_DO = scored_columns(backbone.llama.config, backbone.params, ids_O)
    out = _scoring(backbone, ids_O, {"kernel": kernel_DO})
    if out.lora is None or "lm_head" not in out.lora:
        return out
    adapter = out.lora["lm_head"]
    lora = out.lora | {"lm_head": adapter | {"b": adapter["b"][:, ids_O]}}
    return dataclasses.replace(out, lora=lora)


def stand_in(backbone: Backbone, heads: HeadsConfig) -> Backbone:
    """`narrowed` to the first ids, for when only shapes matter."""
    return (
        narrowed(backbone, jnp.arange(heads.draft_vocab)) if heads.draft_vocab else backbone
    )


def scored_columns(
    config: LlamaConfig, params: Params, ids_O: jax.Array | np.ndarray
) -> jax.Array:
    """Columns [D, O] of the LM head, tied or not.

    Args:
      params: stored parameters, or only their entry with the LM head ("embed_tokens" if tied).
    """
    if config.tie_embeddings:
        return params["embed_tokens"]["embedding"][ids_O].T
    return params["lm_head"]["kernel"][:, ids_O]


def _scoring(backbone: Backbone, ids_O: jax.Array, lm_head: Params | None) -> Backbone:
    config = dataclasses.replace(backbone.llama.config, tie_embeddings=False)
    params = {name: entry for name, entry in backbone.params.items() if name != "lm_head"}
    if lm_head is not None:
        params["lm_head"] = lm_head
    llama = backbone.llama.clone(config=config)
    return Backbone(llama, params, backbone.lora, ids_O)


def most_frequent(counts_V: np.ndarray, n: int) -> np.ndarray:
    """The `n` tokens with the highest counts, sorted by id; ties go to lower ids."""
    return np.sort(np.argsort(-counts_V, kind="stable")[:n]).astype(np.int32)


def covered(counts_V: np.ndarray, n: int) -> float:
    """The share of the `n` highest counts in the sum of all counts."""
    highest = np.sort(counts_V)[::-1][:n]
    return float(highest.sum()) / max(float(counts_V.sum()), 1.0)
