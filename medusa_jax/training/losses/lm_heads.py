"""Logits of the loss as functions of exactly the parameters that they read.

The streamed loss holds a gradient for every parameter that it is given, so it is given no others: `Drafter.head_params`
of a head, and the backbone's LM head where heads share it. A drafter that reads anything else in `head_logits`
fails with an error.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as Spec

from medusa_jax.config import TrainConfig
from medusa_jax.heads.drafter import Drafter
from medusa_jax.heads.optional import SupportsConfidence
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama
from medusa_jax.sharding import Params, PyTree, path_string, spec_for


class HeadReads(NamedTuple):
    """The parameters that the logits of one head read, in the groups of a training stage.

    Attributes:
      heads, backbone, lora: entries of these groups.
      ids_O: the token ids that the backbone's LM head scores; None: all.
    """

    heads: Params
    backbone: Params
    lora: Params | None = None
    ids_O: jax.Array | None = None

    @classmethod
    def of_backbone(cls, backbone: Backbone, heads: Params | None = None) -> "HeadReads":
        """The backbone's LM head, and these entries of the heads."""
        lm_head = backbone.only_lm_head
        return cls(heads or {}, lm_head.params, lm_head.lora, lm_head.ids_O)

    @classmethod
    def of_head(
        cls, drafter: Drafter, params: Params, backbone: Backbone, k: int
    ) -> "HeadReads":
        """The parameters that head k reads."""
        heads = drafter.head_params(params, k)
        if drafter.heads.lm_head == "shared":
            return cls.of_backbone(backbone, heads)
        return cls(heads, {}, None, backbone.ids_O)

    def as_backbone(self, llama: Llama) -> Backbone:
        """A backbone with only these parameters."""
        return Backbone(llama, self.backbone, self.lora, self.ids_O)


# (parameters, features [B, T, D]) -> logits [B, T, O], and the logit [B, T] of the confidence if it is trained.
LMHead = Callable[[HeadReads, jax.Array], tuple[jax.Array, jax.Array | None]]


def backbone_logits(
    llama: Llama, reads: HeadReads, features: jax.Array
) -> tuple[jax.Array, None]:
    """The LM head of the backbone, an `LMHead`."""
    return reads.as_backbone(llama).lm_head(features), None


def head_logits(
    llama: Llama,
    drafter: Drafter,
    k: int,
    train: TrainConfig,
    reads: HeadReads,
    features: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """The LM head of draft head k (0-based), an `LMHead`."""
    logits = drafter.head_logits(reads.heads, reads.as_backbone(llama), k, features)
    if not train.confidence_weight:
        return logits, None
    assert isinstance(drafter, SupportsConfidence)
    if not train.confidence_gradient:
        features = jax.lax.stop_gradient(features)
    return logits, drafter.confidence(reads.heads, features)


class Head(NamedTuple):
    """A head of a streamed loss.

    Attributes:
      logits: its logits.
      reads: the places of its parameters in `HeadArrays.arrays`.
      trained: the places of those that need a gradient.
    """

    logits: LMHead
    reads: HeadReads
    trained: list[int]

    def params(self, arrays: PyTree) -> HeadReads:
        """The parameters, from arrays by place."""
        reads: HeadReads = jax.tree.map(lambda place: arrays[place], self.reads)
        return reads


@dataclass
class HeadArrays:
    """The arrays that all heads of a loss read; heads that share an array share its place and its gradient.

    Attributes:
      groups: the trained groups of variables, among the fields of `HeadReads`.
      arrays: the arrays.
      specs: mesh axes of those that need a gradient, by place.
    """

    groups: Collection[str]
    arrays: list[jax.Array] = field(default_factory=list)
    specs: dict[int, Spec] = field(default_factory=dict)

    def add(self, logits: LMHead, reads: HeadReads) -> Head:
        """Add the parameters of a head."""
        by_path, treedef = jax.tree.flatten_with_path(reads)
        places = []
        for path, array in by_path:
            place = self._place(array)
            places.append(place)
            name = path_string(path)
            # Integers, such as the seed of an adapter's dropout, have no gradient.
            differentiable = jnp.issubdtype(array.dtype, jnp.floating)
            if name.split("/")[0] in self.groups and differentiable:
                self.specs[place] = spec_for(name)
        trained = sorted({place for place in places if place in self.specs})
        return Head(logits, jax.tree.unflatten(treedef, places), trained)

    def _place(self, array: jax.Array) -> int:
        for place, present in enumerate(self.arrays):
            if present is array:
                return place
        self.arrays.append(array)
        return len(self.arrays) - 1
