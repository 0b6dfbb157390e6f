"""Memory of a device in training, computed from shapes before anything is compiled.

Counted at its peak: in the loop over chunks of the heads' loss, together with the update's gradients if there
are several microbatches. What the drafter keeps for its backward pass is read from its program (`kept.py`).
What the buffers of XLA's compilers show is counted too, under a name for each platform:

- For CPUs it widens 16-bit kernels to float32 for some products, whose results it keeps in float32; transposes
  the LM heads that the loop reads repeatedly; and keeps more of a chunk's logits. It also keeps what
  `jax.checkpoint` would compute again, which is not counted (EAGLE's levels after the first).
- For TPUs it copies the shards of a frozen backbone that fsdp divides: before a loop over microbatches, else
  before the pass, whose first layers may then be the peak. A kernel that a backward pass reads too is not copied.

Gaps between buffers, kernels gathered ahead, masks of dropout and the blocks of scores of `train.induction_weight`,
which are freed before that loop, are not counted.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from medusa_jax.config import Config
from medusa_jax.heads.drafter import Drafter, TextRows
from medusa_jax.heads.optional import loss_view
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.llama import Llama
from medusa_jax.sharding import PyTree, bytes_on_device, row_shards
from medusa_jax.training.dry import Shapes
from medusa_jax.training.partition import trained_groups
from medusa_jax.training.stage import GroupedBackbone
from research.kept import kept_bytes

F32 = 4
# Keys of what only the programs of one platform need.
CPU_ONLY, TPU_ONLY = "on a CPU only", "on a TPU only"


def total_bytes(counted: Mapping[str, int], platform: str = "tpu") -> int:
    """The sum for "cpu", "tpu", or else without what only one of these needs."""
    others = {"cpu": (TPU_ONLY,), "tpu": (CPU_ONLY,)}.get(platform, (CPU_ONLY, TPU_ONLY))
    return sum(n for name, n in counted.items() if name not in others)


def training_bytes(cfg: Config, shapes: Shapes) -> dict[str, int]:
    """Bytes by purpose.

    Temporaries are counted for draft heads on a frozen or rematerialised backbone; otherwise only what is
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
    trained = trained_groups(cfg.train, cfg.lora)
    return "heads" in trained and (trained.keys() == {"heads"} or cfg.train.remat)


def _temporaries(cfg: Config, shapes: Shapes) -> dict[str, int]:
    mesh, arch, t = shapes.mesh, cfg.model.arch, cfg.train
    A, B, T = shapes.batch["tokens"].shape
    rows, tensor, fsdp = B // row_shards(mesh), mesh.shape["tensor"], mesh.shape["fsdp"]
    joint = not trained_groups(t, cfg.lora).keys() <= {"heads"}
    wide = jnp.dtype(t.dtype).itemsize
    drafter = loss_view(make_drafter(cfg.heads, arch), t.levels)
    K, shared = drafter.n_heads, cfg.heads.lm_head == "shared"
    # LM heads that train; low-rank ones are negligible. The levels of a drafter have one.
    own = min(drafter.stored_counts[0], K) if cfg.heads.lm_head == "own" else 0
    read = own + (joint or shared)
    columns = (cfg.heads.draft_vocab or arch.vocab_size) // tensor
    lm_head = arch.d_model * columns
    hidden = rows * T * arch.d_model
    logits = rows * min(t.loss_chunk, T) * columns
    kl = t.backbone_loss == "kl"
    teacher = kl or t.teacher_weight > 0
    trained = sum(
        x.size for x in jax.tree.leaves(jax.tree.map(shard_of, shapes.state.params))
    )
    frozen = [x for group in shapes.frozen.values() for x in _layers(group)]
    layers = frozen + [x for group in shapes.state.params.values() for x in _layers(group)]
    # One head at a time: its logits and their gradient, or that and the LM head's; and a teacher's logits.
    gradient = (own > 0) * F32 * lm_head
    chunk = max((F32 + wide) * logits, wide * logits + gradient) + teacher * F32 * logits
    # Heads that share an LM head: the logits of all are computed first, or its gradients are added up last.
    waiting = 0
    if shared:
        waiting = (K - 1) * logits * wide
    elif own:
        waiting = (K - own) * lm_head * wide
    loop = {
        "gradients of LM heads": own * F32 * lm_head,
        "logits, and gradients of a chunk": chunk + waiting,
        "LM heads as they are read": read * lm_head * wide,
        "features and their gradients": hidden * wide * (2 * K + teacher + joint * 2),
        "kept by the heads": _kept(cfg, drafter, rows, T, shapes),
        "inputs of blocks": joint * arch.n_layers * hidden * wide,
    }
    # A CPU keeps the logits, their probabilities and their gradient, a teacher's with their logarithm;
    # products in float32; and LM heads transposed. It gathers an LM head in float32, into memory that the
    # loop reuses.
    more = (3 + 2 * teacher) * F32 * logits + gradient + read * lm_head * wide - chunk
    more += loop["kept by the heads"] * max(F32 - wide, 0) // wide
    gathered = F32 * lm_head if fsdp > 1 else 0
    widened = narrow_elements(layers) * _copy(A, fsdp, joint, wide)
    # The pass over a frozen backbone comes first, when the layers' copies are there and the loss is not.
    copies, forward = 0, 0
    if fsdp > 1 and not joint and "hidden" not in shapes.batch:
        copies = bytes_on_device(frozen)
        layer = sum(x.size for x in jax.tree.leaves(frozen[:1])) // tensor
        forward = copies + wide * (layer + 2 * hidden + 2 * rows * T * arch.d_ff // tensor)
    return loop | {
        "gradients of the update": F32 * trained if A > 1 else 0,
        CPU_ONLY: widened + more + max(gathered - own * F32 * lm_head - chunk - more, 0),
        TPU_ONLY: copies if A > 1 else max(forward - sum(loop.values()), 0),
    }


def _kept(cfg: Config, drafter: Drafter, rows: int, T: int, shapes: Shapes) -> int:
    """What the backward pass of the drafter keeps of `rows` rows, as if no tensor axis split it."""
    arch, dtype = cfg.model.arch, jnp.dtype(cfg.train.dtype)
    grouped = GroupedBackbone(Llama(arch, dtype, taps=drafter.taps), cfg.lora)
    groups = shapes.frozen | shapes.state.params

    def features(heads: PyTree, hidden_BTE: jax.Array, groups: PyTree) -> jax.Array:
        zeros_BT = jnp.zeros((rows, T), jnp.int32)
        text = TextRows(hidden_BTE, zeros_BT, zeros_BT, zeros_BT, jax.random.key(0))
        return drafter.features(heads, grouped.drafting(groups), text)

    width = arch.d_model * (1 + len(drafter.taps))
    hidden_BTE = jax.ShapeDtypeStruct((rows, T, width), dtype)
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), groups)
    return kept_bytes(features, whole.pop("heads"), hidden_BTE, whole)


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
