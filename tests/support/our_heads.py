"""Heads as the package writes, reads and runs them, after one text over a tiny random backbone."""

import jax
import jax.numpy as jnp
import numpy as np
from head_files import LLAMA, D, V, normal
from tiny import random_params, write_tokenizer

from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.files.layouts import heads_io, native_heads
from medusa_jax.files.layouts.convert import convert
from medusa_jax.files.layouts.layout import Export
from medusa_jax.files.layouts.stored_heads import abstract_heads
from medusa_jax.heads import vocabulary
from medusa_jax.heads.drafter import TextRows
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama
from medusa_jax.sharding import make_mesh

T = 5
BASE = random_params(LLAMA, 0)
HIDDEN = np.random.default_rng(5).standard_normal((T, D))
# What EAGLE-3 reads at the same positions, from inside the model.
STREAMS = np.random.default_rng(7).standard_normal((T, 3 * D))
TOKENS = np.random.default_rng(6).integers(0, V, 9)
# What Hydra's heads read after position T - 1: the tokens that follow, up to the head's own.
EMBEDDED = BASE["embed_tokens"]["embedding"][TOKENS[T : T + 3]]
# What EAGLE's layers read, as deep as there are tokens: those after each position.
FOLLOWING = BASE["embed_tokens"]["embedding"][TOKENS[1:]]


def write_base(path, llama=LLAMA, params=BASE, dtype="float32"):
    """A backbone on disk, with a tokenizer."""
    write_tokenizer(path)
    save_backbone(str(path), llama, jax.tree.map(np.dtype(dtype).type, params), dtype)
    return BaseFiles.open(str(path))


def write_heads(path, base, heads, seed=0, dtype="float32", norms=0.0):
    """Random heads in the project's own format, over random tokens if they have a draft vocabulary.

    Args:
      norms: the mean of vectors; with 1 attention is as sharp as usual.
    """
    rng, llama = np.random.default_rng(seed), base.config
    shapes = abstract_heads(heads, llama)
    params = jax.tree.map(
        lambda x: 2 * normal(rng, *x.shape) + np.float32(norms * (x.ndim == 1)), shapes
    )
    if heads.draft_vocab:
        ids = np.sort(rng.choice(llama.vocab_size, heads.draft_vocab, replace=False))
        params[vocabulary.GROUP] = {"ids": ids.astype(np.int32)}
    record = native_heads.base_record(llama, base.fingerprint())
    native_heads.save_heads(str(path), heads, params, base=record, recipe={}, dtype=dtype)
    return heads_io.open_heads(str(path))


def exported(stored, base, target, out, **fields):
    """The directory that `convert` writes."""
    convert(Export(stored, base, "owner/base", **fields), target, str(out))
    return out


def load(path, llama=LLAMA, **options):
    """Configuration, parameters and description, in float64."""
    options = {"dtype": "float64"} | options
    return heads_io.load_heads(str(path), llama, make_mesh(), **options)


def logits_of(drafter, params, base, hidden_BTE, tokens_BT, step=1, llama=None):
    """Logits [K, B, T, O] of a drafter after every position, over a backbone with the parameters `base`.

    Args:
      step: the distance of the positions.
      llama: the backbone's shape, if it is not like Llama's.
    """
    module = Llama(llama or drafter.llama, jnp.float64)
    backbone = Backbone(module, jax.tree.map(jnp.asarray, base))
    if (vocab := params.get(vocabulary.GROUP)) is not None:
        backbone = vocabulary.narrowed(backbone, jnp.asarray(vocab["ids"]))
    positions_BT = np.broadcast_to(step * np.arange(tokens_BT.shape[1]), tokens_BT.shape)
    rows = TextRows(hidden_BTE, tokens_BT, positions_BT, np.ones(tokens_BT.shape, np.int32))
    features = drafter.features(params, backbone, rows)
    heads = enumerate(features)
    return np.stack([drafter.head_logits(params, backbone, k, x) for k, x in heads])


def our_logits(heads, params, llama=LLAMA):
    """[K, V] after position T - 1 of the hidden states, the later tokens as they are."""
    drafter = make_drafter(heads, llama)
    given = np.concatenate([HIDDEN, STREAMS], -1)[:, : D * (1 + len(drafter.taps))]
    hidden = np.pad(given, ((0, len(TOKENS) - T), (0, 0)))
    rows = BASE, hidden[None], TOKENS[None]
    return logits_of(drafter, params, *rows, llama=llama)[:, 0, T - 1]
