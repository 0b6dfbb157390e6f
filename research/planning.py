"""Lower bounds of an update's time from its FLOPs, its traffic and the peaks of chips.

Only products are counted, not norms, softmax or the optimizer. Real runs usually reach 40 to 60% of a chip's
peak.
"""

from typing import NamedTuple

import jax

from medusa_jax.config import Config, LlamaConfig
from medusa_jax.devices.chips import CHIPS, Chip
from medusa_jax.heads.optional import loss_view
from medusa_jax.heads.registry import make_drafter
from medusa_jax.sharding import PyTree
from medusa_jax.training.partition import trained_groups
from medusa_jax.whole_files import Json


def layer_weights(arch: LlamaConfig) -> int:
    """Number of elements of the kernels of all layers."""
    attention = 2 * (arch.n_heads + arch.n_kv_heads) * arch.head_dim * arch.d_model
    return arch.n_layers * (attention + 3 * arch.d_model * arch.d_ff)


def flops_per_token(cfg: Config, params: PyTree) -> float:
    """FLOPs of one token in an update, forward and backward.

    A kernel [in, out] takes 2 x in x out each for the forward pass, the gradient of its input and, if trained,
    its own gradient.

    Args:
      params: the trained groups, or their shapes.
    """
    arch, t, groups = cfg.model.arch, cfg.train, trained_groups(cfg.train, cfg.lora)
    # Scores and weighted values, 2 FLOPs each; a position sees half of the row on average.
    attention = 2 * arch.n_layers * arch.n_heads * arch.head_dim * cfg.data.seq_len
    forward = 2.0 * layer_weights(arch) + attention
    lm_head = 2.0 * arch.d_model * arch.vocab_size
    full, adapters = "backbone" in groups, "lora" in groups
    passes = 0.0 if cfg.data.cache_features else 1.0
    if full or adapters:
        passes += 2 if full else 1
        passes += bool(t.remat) + (t.backbone_loss == "kl")
    total = passes * forward
    if full or adapters:  # the loss of the next token
        total += lm_head * (2 + full + (t.backbone_loss == "kl"))
    if adapters:
        total += 3 * 2.0 * _kernels(params["lora"])
    if "heads" in groups:
        scored = cfg.heads.draft_vocab or arch.vocab_size
        head_logits = 2.0 * arch.d_model * scored
        view = loss_view(make_drafter(cfg.heads, arch), t.levels)
        # Levels share their layers; all but the first are recomputed.
        runs = view.n_heads / view.stored_counts[0]
        total += (4 * runs - 1) * 2.0 * _kernels(params["heads"])
        if cfg.heads.lm_head == "shared":
            total += view.n_heads * head_logits * (2 + full)
        total += head_logits * (t.teacher_weight > 0)
    return total


def _kernels(tree: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree) if len(x.shape) > 1)


class Prediction(NamedTuple):
    """Lower bounds of an update's seconds, one per resource.

    Attributes:
      compute: FLOPs at the chip's peak.
      memory: the arguments of the step, read once per microbatch.
      links: bytes sent, over the links in one direction.
      fits: whether the step fits the chip's memory.
    """

    compute: float
    memory: float
    links: float
    fits: bool

    @property
    def seconds(self) -> float:
        """The bound if all resources are used in parallel."""
        return max(self.compute, self.memory, self.links)


def predict(report: Json, chip: Chip) -> Prediction:
    """The prediction for one chip from the report of a dry run."""
    read = report["argument_bytes"] * report["batch"][0]
    sent = sum(report["sent_bytes"].values())
    return Prediction(
        report["flops"] / report["devices"] / chip.flops,
        read / chip.bandwidth,
        sent / (chip.link / 2),
        report["total_bytes"] <= chip.memory,
    )


def lines(report: Json) -> list[str]:
    """Lines of a dry run about time: traffic, FLOPs, then one per chip."""
    sent = report["sent_bytes"]
    by_kind = " + ".join(f"{n / 2**30:.2f} GiB {kind}" for kind, n in sent.items())
    tokens = report["batch"][0] * report["batch"][1] * report["batch"][2]
    out = [
        f"sent by each device   {by_kind or 'nothing'} per update",
        f"arithmetic            {report['flops'] / 1e12:,.0f} TFLOP per update of {tokens:,} "
        "tokens",
        "an update takes at least (each limit by itself, at peak)",
    ]
    for chip in CHIPS.values():
        p = predict(report, chip)
        held = f"{report['total_bytes'] / 1e9:.1f} of {chip.memory / 1e9:.0f} GB"
        out.append(
            f"  {chip.title:15} compute {p.compute:8.3f} s  memory {p.memory:7.3f} s  "
            f"links {p.links:7.3f} s  {'fits' if p.fits else 'too small'}: {held}"
        )
    return out
