"""Memory of a device in training, computed from shapes before anything is compiled.

Counted at its peak: in the loop over chunks of the heads' loss, together with the update's gradients if there
are several microbatches. What the buffers of XLA's compilers show is counted too, under a name for each platform:

- For CPUs it widens 16-bit kernels to float32 for some products, transposes the LM heads that the loop reads
  repeatedly, and keeps more of a chunk's logits.
- For TPUs it copies the shards of a frozen backbone before a loop over microbatches that reads each once. A
  kernel that a backward pass reads too, or that no mesh divides, is not copied.

Gaps between buffers are not counted.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from medusa_jax.config import Config
from medusa_jax.sharding import PyTree, bytes_on_device, row_shards
from medusa_jax.training.partition import trained_groups
from medusa_jax.training.step import Shapes

F32 = 4
# Keys of what only the programs of one platform need.
CPU_ONLY, TPU_ONLY = "on a CPU only", "on a TPU only"


def total_bytes(counted: Mapping[str, int], platform: str = "tpu") -> int:
    """The sum for "cpu", "tpu", or else without what only one of these needs."""
    others = {"cpu": (TPU_ONLY,), "tpu": (CPU_ONLY,)}.get(platform, (CPU_ONLY, TPU_ONLY))
    return sum(n for name, n in counted.items() if name not in others)


def training_bytes(cfg: Config, shapes: Shapes) -> dict[str, int]:
    """Bytes by purpose.

    Temporaries are counted for Medusa heads on a frozen or rematerialised backbone; otherwise only what is
    stored between steps.

    Args:
      cfg: with the number of microbatches of `shapes`.
    """
    groups = (*shapes.frozen.values(), *shapes.state.params.values())
    stored = {
        "parameters": bytes_on_device(groups),
        "moments": bytes_on_device(shapes.state.opt),
        "batch": bytes_on_device(shapes.batch),
    }
    return stored | (_temporaries(cfg, shapes) if has_temporaries(cfg) else {})


def has_temporaries(cfg: Config) -> bool:
    """Whether `training_bytes` counts the temporaries of a step."""
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
    # LM heads that the loop reads; low-rank ones are negligible.
    own = heads.n_heads if heads.lm_head == "own" else 0
    read = own + (joint or heads.lm_head == "shared")
    columns = (heads.draft_vocab or arch.vocab_size) // tensor
    lm_head = arch.d_model * columns
    hidden = rows * T * arch.d_model
    logits = rows * min(cfg.train.loss_chunk, T) * columns
    kl = cfg.train.backbone_loss == "kl"
    # A block of a head keeps the input of its activation, in float32; all but the last keep their output.
    blocks = heads.n_layers * F32 + max(heads.n_layers - 1, 0) * wide
    trained = sum(
        x.size for x in jax.tree.leaves(jax.tree.map(shard_of, shapes.state.params))
    )
    frozen = [x for group in shapes.frozen.values() for x in _layers(group)]
    layers = frozen + [x for group in shapes.state.params.values() for x in _layers(group)]
    # One head at a time: its logits and their gradient, or that and the LM head's; and a teacher's logits.
    gradient = (own > 0) * F32 * lm_head
    chunk = max((F32 + wide) * logits, wide * logits + gradient) + kl * F32 * logits
    loop = {
        "gradients of LM heads": own * F32 * lm_head,
        "logits, and gradients of a chunk": chunk,
    }
    # A CPU keeps the logits, their probabilities and their gradient, a teacher's with their logarithm;
    # the output of every block; and LM heads transposed. It gathers an LM head in float32, into memory
    # that the loop reuses.
    kept = (3 + 2 * kl) * F32 * logits + gradient + read * lm_head * wide - chunk
    gathered = F32 * lm_head if mesh.shape["fsdp"] > 1 else 0
    widened = narrow_elements(layers) * _copy(A, mesh.shape["fsdp"], joint, wide)
    outputs = heads.n_heads * hidden * wide * (heads.n_layers > 0)
    return loop | {
        "gradients of the update": F32 * trained if A > 1 else 0,
        "LM heads as they are read": read * lm_head * wide,
        "features and their gradients": hidden
        * (heads.n_heads * (2 * wide + blocks) + wide + joint * 2 * wide),
        "inputs of blocks": joint * arch.n_layers * hidden * wide,
        CPU_ONLY: widened + kept + outputs + max(gathered - sum(loop.values()) - kept, 0),
        TPU_ONLY: bytes_on_device(frozen)
        * (A > 1 and not joint and mesh.shape["fsdp"] > 1),
    }


def _layers(group: PyTree) -> list[PyTree]:
    """The parameters of every layer of a group."""
    return [x for name, x in group.items() if "layers_" in name]


def _copy(A: int, fsdp: int, joint: bool, wide: int) -> int:
    """Additional bytes on a CPU per element of a layer's 16-bit kernels.

    Over fsdp the CPU's replacement of a barrier (`model/barrier.py`) is a sum in float32, whose result the
    backward pass reads too. On one device, kernels that a backward pass reads are widened before the loop
    over microbatches.
    """
    if A == 1:
        return 0
    return F32 + joint * wide if fsdp > 1 else joint * F32


def narrow_elements(tree: PyTree) -> int:
    """Number of elements of 16-bit kernels on one device."""
    return sum(
        shard_of(x).size
        for x in jax.tree.leaves(tree)
        if x.ndim > 1 and x.dtype in (jnp.bfloat16, jnp.float16)
    )


def shard_of(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of an array's shard on one device."""
    assert x.sharding is not None
    return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
