"""Draft heads that are described but not read yet."""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import jax
import numpy as np

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.source import Source
from medusa_jax.heads import vocabulary
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.convert import abstract_params
from medusa_jax.model.llama import Llama
from medusa_jax.sharding import PyTree
from medusa_jax.whole_files import Json

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class StoredHeads(Source):
    """Draft heads that are described but not read yet.

    Attributes:
      directory: their directory, which may have a tree file.
      layout: the name of the layout.
      heads: kind and sizes.
      meta: contents of the description next to the weights, {} if none.
      base: width, vocabulary and fingerprint of their backbone, as far as known; an unknown one matches any model.
      layers: fields of the backbone's shape that decoder layers of the heads depend on, if described.
      ids: token ids of the draft vocabulary; None if the heads score all tokens.
      copied_lm_heads: the keys of all LM heads, if they may be copies of the backbone's.
      copied_embedding: the key of what should be the backbone's embedding times its factor.
      trained_on: the file that they were trained on, if they are for all files of its model; else "".
    """

    directory: str
    layout: str
    heads: HeadsConfig
    meta: Json = field(default_factory=dict)
    base: Json = field(default_factory=dict)
    layers: Json = field(default_factory=dict)
    ids: np.ndarray | None = None
    copied_lm_heads: tuple[str, ...] = ()
    copied_embedding: str = ""
    trained_on: str = ""

    def fitted(self, base: BaseFiles) -> "StoredHeads":
        """The same heads, set to use the model's own LM head, MLP width and epsilon where theirs are only copies.

        Raises:
          UserError: their embedding is not the model's.
        """
        tensors = dict(self.tensors)
        embedding = tensors.get(self.copied_embedding)
        if embedding is not None and not base.has_embedding(embedding):
            raise UserError(
                f"key {self.copied_embedding!r} in {self.source} is not the model's embedding times "
                f"{base.config.embedding_multiplier:g}: heads with an embedding of their own are not supported"
            )
        fields: Json = {}
        copies = [tensors.pop(key, None) for key in self.copied_lm_heads]
        if copies and all(x is not None and base.has_lm_head(x, self.ids) for x in copies):
            fields["lm_head"] = "shared"
        else:
            tensors = self.tensors
        for name in ("d_ff", "rms_eps"):
            if getattr(self.heads, name, 0) == getattr(base.config, name):
                fields[name] = 0
        return replace(self, heads=replace(self.heads, **fields), tensors=tensors)

    def read(self, llama: LlamaConfig) -> Arrays:
        """Read all parameters to the host by path, in their stored type.

        Raises:
          UserError: a missing, unknown, misshaped or non-float key, or a draft vocabulary that does not fit.
        """
        arrays = self.arrays(abstract_heads(self.heads, llama))
        check_ids(self.ids, self.heads, llama.vocab_size, self.source)
        return arrays


@lru_cache(maxsize=16)
def abstract_heads(heads: HeadsConfig, llama: LlamaConfig) -> PyTree:
    """Shapes of a drafter's parameters."""
    drafter = make_drafter(heads, llama)

    def init(params: PyTree) -> PyTree:
        backbone = Backbone(Llama(llama), params)
        return drafter.init(jax.random.key(0), vocabulary.stand_in(backbone, heads))

    return jax.eval_shape(init, abstract_params(llama))


def check_ids(
    ids: np.ndarray | None, heads: HeadsConfig, vocab_size: int, source: str
) -> None:
    """Refuse ids that are not `heads.draft_vocab` ascending ids of the vocabulary.

    Raises:
      UserError: names the source and what is wrong.
    """
    if ids is None:
        return
    fits = ids.shape == (heads.draft_vocab,) and ids[0] >= 0 and ids[-1] < vocab_size
    if not fits or (np.diff(ids.astype(np.int64)) <= 0).any():
        raise UserError(
            f"{source} should hold {heads.draft_vocab} ascending token ids below {vocab_size} as its draft "
            "vocabulary"
        )
