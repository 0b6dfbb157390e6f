"""What a device holds in training, summed up by hand from shapes: known before anything is compiled.

Counted where most is held at a time: in the walk over chunks of the heads' loss, with the update's
gradients where there are several microbatches. XLA for CPUs lays memory out with gaps, widens 16-bit
kernels to float32 for some of its products, and keeps a transposed copy of those that it multiplies
both ways; the last is counted by name, since the walk reads such kernels again and again, the others
are not.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from medusa_jax.config import Config
from medusa_jax.sharding import PyTree, row_shards
from medusa_jax.training.partition import trained_groups
from medusa_jax.training.step import Shapes

F32 = 4
# What only a CPU holds of a program in 16 bits.
COPIES = "float32 copies"


def bytes_on_device(tree: PyTree) -> int:
    """What of arrays, or of shapes with their places, lies on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


def training_bytes(cfg: Config, shapes: Shapes) -> dict[str, int]:
    """Bytes by what they are for.

    Of Medusa heads, on a backbone that is frozen or computed anew for its gradients; of other drafters
    and of a backbone that keeps its activations only what is stored between steps.

    Args:
      cfg: with the microbatches of `shapes`.
      shapes: of the whole step.
    """
    groups = (*shapes.frozen.values(), *shapes.state.params.values())
    stored = {
        "parameters": bytes_on_device(groups),
        "moments": bytes_on_device(shapes.state.opt),
        "batch": bytes_on_device(shapes.batch),
    }
    return stored | (_temporaries(cfg, shapes) if has_temporaries(cfg) else {})


def has_temporaries(cfg: Config) -> bool:
    """Whether `training_bytes` counts what a step holds besides what is stored between steps."""
    trained = trained_groups(cfg)
    frozen = trained.keys() <= {"heads"}
    return (
        cfg.heads.drafter == "medusa" and "heads" in trained and (frozen or cfg.train.remat)
    )


def _temporaries(cfg: Config, shapes: Shapes) -> dict[str, int]:
    mesh, arch, heads = shapes.mesh, cfg.model.arch, cfg.heads
    A, B, T = shapes.batch["tokens"].shape
    rows, tensor = B // row_shards(mesh), mesh.shape["tensor"]
    joint = not trained_groups(cfg).keys() <= {"heads"}
    wide = jnp.dtype(cfg.train.dtype).itemsize
    # LM heads that the walk reads; those of low rank count as nothing.
    own = heads.n_heads if heads.lm_head == "own" else 0
    read = own + (joint or heads.lm_head == "shared")
    columns = (heads.draft_vocab or arch.vocab_size) // tensor
    lm_head = arch.d_model * columns
    hidden = rows * T * arch.d_model
    logits = rows * min(cfg.train.loss_chunk, T) * columns * F32
    # A block of a head keeps what its activation reads, in float32, and what it gives.
    of_head = 2 * wide + heads.n_layers * (F32 + wide)
    trained = sum(
        x.size for x in jax.tree.leaves(jax.tree.map(own_part, shapes.state.params))
    )
    groups = (*shapes.frozen.values(), *shapes.state.params.values())
    layers = [x for group in groups for name, x in group.items() if "layers_" in name]
    # What the walk over chunks has beside the LM heads themselves.
    walk = {
        "LM heads transposed": read * lm_head * wide,
        "gradients of LM heads, and of one in a chunk": (own + (own > 0)) * lm_head * F32,
        # As they are, as probabilities, and their gradient; a teacher's and their logarithm.
        "logits": (3 + 2 * (cfg.train.backbone_loss == "kl")) * logits,
    }
    # A CPU gathers an LM head in float32, where the walk will be.
    gathered = F32 * lm_head if mesh.shape["fsdp"] > 1 else 0
    copies = narrow_elements(layers) * _copy(A, mesh.shape["fsdp"], joint, wide)
    return walk | {
        "gradients of the update": F32 * trained if A > 1 else 0,
        "LM heads as they are read": read * lm_head * wide,
        "features and their gradients": hidden
        * (heads.n_heads * of_head + wide + joint * 2 * wide),
        "inputs of blocks": joint * arch.n_layers * hidden * wide,
        COPIES: copies + max(gathered - sum(walk.values()), 0),
    }


def _copy(A: int, fsdp: int, joint: bool, wide: int) -> int:
    """Bytes that only a CPU spends beside an element of a 16-bit kernel of a layer.

    Over fsdp kernels wait for their microbatch by a sum (`model/barrier.py`), whose terms are float32;
    and what comes of it, where the backward pass reads it again. On one device those that a backward
    pass reads are widened before the loop over microbatches.
    """
    if A == 1:
        return 0
    return F32 + joint * wide if fsdp > 1 else joint * F32


def narrow_elements(tree: PyTree) -> int:
    """How many elements of kernels in 16-bit floats one device has."""
    return sum(
        own_part(x).size
        for x in jax.tree.leaves(tree)
        if x.ndim > 1 and x.dtype in (jnp.bfloat16, jnp.float16)
    )


def own_part(x: Any) -> Any:
    """The shape of what one device has of an array."""
    return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
