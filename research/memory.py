"""Memory of a device, summed up by hand to check the figures of compiled programs.

Training is counted at its peak: in the loop over chunks of the heads' loss, plus the gradients of the
update if there are several microbatches. XLA for CPUs leaves gaps between buffers, converts 16-bit
kernels to float32 for some products, and keeps transposed copies of kernels that it multiplies both
ways. Only the transposed copies of LM heads are counted, since the loop reads them repeatedly.
Decoding is counted with the float32 copies, which exist during the whole loop.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from medusa_jax.config import Config
from medusa_jax.sharding import PyTree, row_shards
from medusa_jax.training.dry import Shapes
from medusa_jax.training.partition import trained_groups

F32 = 4
# Memory that 16-bit programs need only on a CPU.
COPIES = "float32 copies"


def bytes_on_device(tree: PyTree) -> int:
    """Bytes on one device of arrays, or of shapes with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


def training_bytes(cfg: Config, shapes: Shapes) -> dict[str, int]:
    """Bytes by purpose for training Medusa heads, with separate LM heads or the backbone's.

    Args:
      cfg: configuration with the microbatches of `shapes`.
      shapes: shapes of the whole step.
    """
    mesh, arch, heads = shapes.mesh, cfg.model.arch, cfg.heads
    A, B, T = shapes.batch["tokens"].shape
    rows, tensor = B // row_shards(mesh), mesh.shape["tensor"]
    joint = not trained_groups(cfg).keys() <= {"heads"}
    wide = jnp.dtype(cfg.train.dtype).itemsize
    # Number of LM heads that the loop reads; low-rank ones are not counted.
    own = heads.n_heads if heads.lm_head == "own" else 0
    read = own + (joint or heads.lm_head == "shared")
    columns = (heads.draft_vocab or arch.vocab_size) // tensor
    lm_head = arch.d_model * columns
    hidden = rows * T * arch.d_model
    logits = rows * min(cfg.train.loss_chunk, T) * columns * F32
    # A block of a head keeps the input of its activation in float32, and its output.
    of_head = 2 * wide + heads.n_layers * (F32 + wide)
    trained = sum(
        x.size for x in jax.tree.leaves(jax.tree.map(_own_part, shapes.state.params))
    )
    groups = (*shapes.frozen.values(), *shapes.state.params.values())
    layers = [x for group in groups for name, x in group.items() if "layers_" in name]
    # Memory of the loop over chunks in addition to the LM heads.
    walk = {
        "LM heads transposed": read * lm_head * wide,
        "gradients of LM heads, and of one in a chunk": (own + (own > 0)) * lm_head * F32,
        # Logits, probabilities and gradient; for a teacher, its logits and their logarithm.
        "logits": (3 + 2 * (cfg.train.backbone_loss == "kl")) * logits,
    }
    # A CPU gathers an LM head in float32, in the memory that the loop will use.
    gathered = F32 * lm_head if mesh.shape["fsdp"] > 1 else 0
    copies = _narrow(layers) * _copy(A, mesh.shape["fsdp"], joint, wide)
    return walk | {
        "parameters": bytes_on_device(groups),
        "moments": bytes_on_device(shapes.state.opt),
        "batch": bytes_on_device(shapes.batch),
        "gradients of the update": F32 * trained if A > 1 else 0,
        "LM heads as they are read": read * lm_head * wide,
        "features and their gradients": hidden
        * (heads.n_heads * of_head + wide + joint * 2 * wide),
        "inputs of blocks": joint * arch.n_layers * hidden * wide,
        COPIES: copies + max(gathered - sum(walk.values()), 0),
    }


def _copy(A: int, fsdp: int, joint: bool, wide: int) -> int:
    """Extra bytes that only a CPU needs per element of a layer's 16-bit kernels.

    Over fsdp a sum makes kernels wait for their microbatch (`model/barrier.py`): its terms are float32,
    and its result is kept if the backward pass reads it. On one device the kernels that a backward
    pass reads are converted to float32 before the loop over microbatches.
    """
    if A == 1:
        return 0
    return F32 + joint * wide if fsdp > 1 else joint * F32


def _narrow(tree: PyTree) -> int:
    """Number of elements of 16-bit kernels on one device."""
    return sum(
        _own_part(x).size
        for x in jax.tree.leaves(tree)
        if x.ndim > 1 and x.dtype in (jnp.bfloat16, jnp.float16)
    )


def _own_part(x: Any) -> Any:
    """The shape of one device's shard of an array."""
    return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)


def decoding_bytes(
    variables: PyTree, state: Any, nodes: int, vocab_size: int
) -> dict[str, int]:
    """Bytes by purpose for decoding, from shapes with shardings.

    Logits are in float32, each device has those of its columns of the LM head. On a CPU, products of
    16-bit kernels with several rows stay in 16 bits; before the loop XLA makes float32 copies of the
    embedding table and of kernels multiplied with a single row, those of the draft heads. An
    accelerator makes no copies.
    """
    cache = (state.cache, state.drafter)
    rows = _own_part(state.status_B).size
    copied = [
        variables["backbone"]["embed_tokens"],
        variables["heads"] if rows == 1 else {},
    ]
    columns = vocab_size // state.status_B.sharding.mesh.shape["tensor"]
    return {
        "parameters": bytes_on_device(variables),
        "caches": bytes_on_device(cache),
        "other state": bytes_on_device(state) - bytes_on_device(cache),
        "logits": rows * nodes * columns * F32,
        COPIES: _narrow(copied) * F32,
    }
